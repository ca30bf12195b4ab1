"""Output of the workers: whole lines with the rank on the console, and raw bytes in one file per rank.

Runs in: coordinator.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from distrain.storage.retention import flatten
from distrain.system.background import Background
from distrain.system.log import print_to, say, warn, without_controls

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

_LONGEST_LINE = 64 << 10
_LINES_KEPT = 300
_LONGEST_KEPT = 2 << 10
_MOST_UNWRITTEN_BYTES = 64 << 20
"""Output of a rank that may wait for a slow disk. More output is left out of the log."""
REPORT_INTERVAL_S = 0.5
"""Seconds between two report lines on the console; metrics.jsonl has all reports."""
PROGRESS_INTERVAL_S = 5.0
"""Seconds between two states of a progress bar on the console."""


class _Stream:
    """A splitter of bytes into lines.

    Of a line with carriage returns it returns the last state. Of a line that stays open, such as a progress bar, it
    returns the current state every :data:`PROGRESS_INTERVAL_S`.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown_at = 0.0

    def feed(self, data: bytes, now: float) -> list[str]:
        begins = not self._rest
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines or begins:
            self._shown_at = now
        is_due = b"\r" in self._rest and now >= self._shown_at + PROGRESS_INTERVAL_S
        if is_due or len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest, self._shown_at = b"", now
        return [_last_state(line) for line in lines]

    def end(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [_last_state(rest)] if rest else []


def _last_state(line: bytes) -> str:
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    return without_controls(text)


class _Log:
    """The log file of one rank, as the background thread writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def append(self, data: bytes) -> int:
        """Write the bytes and return how many they are. Raises OSError."""
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        return len(data)

    def close(self) -> int:
        if self._file is not None:
            self._file.close()
        self._file = None
        return 0


class RankOutput:
    """Output of one rank of one attempt, shown on the console and written to a file.

    file: its directory must exist.
    width: width of the rank in front of each line.
    shown: False keeps the output off the console.
    host: name of the host in front of each line; empty for none.
    background: writes the file.
    Attribute ``last_lines``: the last lines, cut to a length that fits a failure screen.
    """

    def __init__(
        self,
        rank: int,
        file: Path,
        *,
        width: int = 1,
        shown: bool = True,
        host: str = "",
        background: Background | None = None,
    ) -> None:
        self._shown = shown
        self._prefix = f"[rank {rank:>{width}}{' ' * bool(host)}{host}] "
        self._prefix_of_torch = f"[rank{rank}]:"
        self._log = _Log(file)
        self._background = background or Background(None, "log")
        self._chunks: list[bytes] = []
        self._unwritten_bytes = 0
        self._left_out_bytes = 0
        self._broken = False
        self._mid_line = False
        self._streams = {1: _Stream(), 2: _Stream()}
        self.last_lines: deque[str] = deque(maxlen=_LINES_KEPT)

    def feed(self, stream: int, data: bytes) -> None:
        """Take bytes that the rank wrote to stdout (1) or stderr (2)."""
        self._write(data)
        self._show(stream, self._streams[stream].feed(data, time.monotonic()))

    def note(self, text: str) -> None:
        """Write a text to the file only, on lines of its own."""
        self._write(b"\n" * self._mid_line + text.encode(errors="backslashreplace"))

    def _write(self, data: bytes) -> None:
        if self._unwritten_bytes > _MOST_UNWRITTEN_BYTES:
            self._left_out_bytes += len(data)
            return
        if self._left_out_bytes:
            text = f"\n... {self._left_out_bytes} bytes are left out here: the disk was too slow ...\n"
            self._left_out_bytes = 0
            data = text.encode() + data
        self._chunks.append(data)
        self._unwritten_bytes += len(data)
        self._mid_line = not data.endswith(b"\n")

    def flush(self) -> None:
        """Give new output to the background, which writes it."""
        chunks, self._chunks = self._chunks, []
        if chunks and not self._broken:
            self._background.do(partial(self._log.append, b"".join(chunks)), self._on_written, self._give_up)

    def _on_written(self, size: int) -> None:
        self._unwritten_bytes -= size

    def _give_up(self, error: OSError) -> None:
        """Continue without the log. Training does not depend on it."""
        if not self._broken:
            warn(f"the log {self._log.path} can no longer be written: {error}")
        self._broken, self._unwritten_bytes = True, 0

    def _show(self, stream: int, lines: list[str]) -> None:
        lines = [line.removeprefix(f"{self._prefix_of_torch} ").removeprefix(self._prefix_of_torch) for line in lines]
        if lines:
            self.last_lines.extend(line[:_LONGEST_KEPT] for line in lines[-_LINES_KEPT:])
        if lines and self._shown:
            console = sys.stdout if stream == 1 else sys.stderr
            print_to(console, "".join(f"{self._prefix}{line}\n" for line in lines))

    def close(self) -> None:
        """Show the last line, even without a line end, and close the file."""
        for number, stream in self._streams.items():
            self._show(number, stream.end())
        self.flush()
        self._background.do(self._log.close, self._on_written, self._give_up)


class WorkerOutput:
    """Output of all ranks, of one attempt after the other.

    file_of: returns the log file of an attempt and a rank.
    background: writes the files.
    shown: the ranks whose output is shown on the console; None for all.
    """

    def __init__(
        self, file_of: Callable[[int, int], Path], background: Background, shown: Collection[int] | None = None
    ) -> None:
        self._file_of = file_of
        self._background = background
        self._shown = shown
        self._ranks: dict[int, RankOutput] = {}
        self._unflushed: set[int] = set()

    def begin(self, attempt: int, hosts: Sequence[str]) -> None:
        """Begin an attempt. The last one must be closed.

        hosts: the host of each rank.
        """
        width = len(str(len(hosts) - 1))
        self._ranks = {
            rank: RankOutput(
                rank,
                self._file_of(attempt, rank),
                width=width,
                shown=self._shown is None or rank in self._shown,
                host=host if len(set(hosts)) > 1 else "",
                background=self._background,
            )
            for rank, host in enumerate(hosts)
        }

    def of(self, rank: int) -> RankOutput:
        """Return the output of a rank. The next :meth:`flush` writes it."""
        self._unflushed.add(rank)
        return self._ranks[rank]

    def last_lines(self) -> dict[int, list[str]]:
        """Return the last lines of each rank, for a failure screen."""
        return {rank: list(output.last_lines) for rank, output in self._ranks.items()}

    def flush(self) -> None:
        for rank in self._unflushed:
            self._ranks[rank].flush()
        self._unflushed.clear()

    def close(self) -> None:
        for output in self._ranks.values():
            output.close()
        self._unflushed.clear()


class ReportLines:
    """Console lines for rank 0's reports, at most one per :data:`REPORT_INTERVAL_S`, and always the last report."""

    def __init__(self) -> None:
        self._shown_at = -REPORT_INTERVAL_S
        self._pending: str | None = None

    def report(self, index: int, metrics: Mapping[str, Any], now: float) -> None:
        self._pending = f"report {index}: " + (", ".join(_shown(metrics)) or "no metrics")
        if now >= self._shown_at + REPORT_INTERVAL_S:
            self.flush(now)

    def deadline(self) -> float | None:
        """Return the time for the next :meth:`flush` if no report comes before, or None."""
        return None if self._pending is None else self._shown_at + REPORT_INTERVAL_S

    def flush(self, now: float) -> None:
        if self._pending is not None:
            say(self._pending)
            self._pending, self._shown_at = None, now


def _shown(metrics: Mapping[str, Any]) -> Iterator[str]:
    for name, value in flatten(metrics).items():
        yield f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={_one_line(value):.60}"


def _one_line(value: object) -> str:
    return "".join(c if c.isprintable() else " " for c in str(value))

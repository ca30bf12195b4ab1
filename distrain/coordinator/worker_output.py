"""Output of the workers: whole lines with the rank on the console, and raw bytes in one file per rank.

Runs in: coordinator.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict, deque
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from distrain.storage.retention import flatten
from distrain.system.background import Background
from distrain.system.log import print_to, say, warn, without_controls

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

_LONGEST_LINE = 64 << 10
_LINES_KEPT = 300
_LONGEST_KEPT = 2 << 10
_BYTES_KEPT = 48 << 10
"""The last output of a rank, from which its last lines are taken."""
_PIECES_KEPT = 1000
_SMALL_PIECE = 4 << 10
_MOST_UNWRITTEN_BYTES = 64 << 20
"""Output of a rank that may wait for a slow disk. More output is left out of the log."""
_MOST_OPEN_LOGS = 64
REPORT_INTERVAL_S = 0.5
"""Seconds between two report lines on the console; metrics.jsonl has all reports."""
PROGRESS_INTERVAL_S = 5.0
"""Seconds between two states of a progress bar on the console."""
_CONTROL_BYTES = bytes(byte for byte in range(0x80) if not without_controls(chr(byte)))


class _Stream:
    """A cutter of bytes into blocks of whole lines.

    Of a line that stays open, such as a progress bar, it returns the current state every :data:`PROGRESS_INTERVAL_S`.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown_at = 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        begins = not self._rest
        end = data.rfind(b"\n") + 1
        block, self._rest = (self._rest + data[:end], data[end:]) if end else (b"", self._rest + data)
        if block or begins:
            self._shown_at = now
        is_due = b"\r" in self._rest and now >= self._shown_at + PROGRESS_INTERVAL_S
        if is_due or len(self._rest) > _LONGEST_LINE:
            self._shown_at = now
            block += self.end()
        return block

    def end(self) -> bytes:
        """Return the open line, ended."""
        rest, self._rest = self._rest, b""
        return rest + b"\n" if rest else b""


def _clean(block: bytes) -> bytes:
    """Return lines as they may appear on a console: the last state of each line, in UTF-8, without control characters.

    Ordinary lines come back as they are. The time for that is a small part of the time to print them.
    """
    if block.isascii() and not any(byte in block for byte in _CONTROL_BYTES):
        return block
    lines = block.decode(errors="replace").split("\n")
    if b"\r" in block:
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    return without_controls("\n".join(lines)).encode()


class _Log:
    """The log file of one rank, and the output that is not written to it yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken = False
        self._chunks: list[bytes] = []
        self._unwritten_bytes = 0
        self._left_out_bytes = 0
        self.mid_line = False

    def add(self, data: bytes) -> None:
        if self._unwritten_bytes > _MOST_UNWRITTEN_BYTES:
            self._left_out_bytes += len(data)
            return
        if self._left_out_bytes:
            text = f"\n... {self._left_out_bytes} bytes are left out here: the disk was too slow ...\n"
            self._left_out_bytes = 0
            self._add(text.encode())
        self._add(data)

    def _add(self, data: bytes) -> None:
        self._chunks.append(data)
        self._unwritten_bytes += len(data)
        self.mid_line = not data.endswith(b"\n")

    def take(self) -> bytes:
        """Return the output that nobody has taken yet, to be written."""
        data = b"".join(self._chunks)
        self._chunks.clear()
        return b"" if self.broken else data

    def on_written(self, size: int) -> None:
        self._unwritten_bytes -= size

    def give_up(self, error: OSError) -> None:
        """Continue without the log. Training does not depend on it."""
        if not self.broken:
            warn(f"the log {self.path} can no longer be written: {error}")
        self.broken, self._unwritten_bytes = True, 0


_Written: TypeAlias = "tuple[_Log, int | OSError]"
"""The number of bytes that were written to a log, or why they were not."""


class LogFiles:
    """The log files of the ranks. The thread of ``background`` writes them, and keeps few of them open."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._changed: dict[_Log, None] = {}
        self._open: OrderedDict[_Log, IO[bytes]] = OrderedDict()
        """Used by the thread only. The file that was written last is the last one."""

    def add(self, log: _Log, data: bytes) -> None:
        """Add output to a log. The next :meth:`flush` writes it."""
        self._changed[log] = None
        log.add(data)

    def flush(self) -> None:
        """Give all new output to the background, as one task."""
        batch = [(log, log.take()) for log in self._changed]
        self._changed.clear()
        if batch:
            self._do(partial(self._write, batch), [log for log, _ in batch])

    def close(self) -> None:
        """Write all new output, and close the files."""
        self.flush()
        self._do(self._close_all, [])

    def _do(self, work: Callable[[], list[_Written]], logs: list[_Log]) -> None:
        def give_up(error: OSError) -> None:  # there is no thread
            for log in logs:
                log.give_up(error)

        self._background.do(work, _note_written, give_up)

    # -- in the thread --------------------------------------------------------------------------------------------

    def _write(self, batch: list[tuple[_Log, bytes]]) -> list[_Written]:
        results: list[_Written] = []
        for log, data in batch:
            if data:
                results.append((log, self._append(log, data)))
            if len(self._open) > _MOST_OPEN_LOGS:
                results.append(self._close(*self._open.popitem(last=False)))
        return results

    def _append(self, log: _Log, data: bytes) -> int | OSError:
        try:
            if log not in self._open:
                self._open[log] = log.path.open("ab", buffering=0)
            self._open.move_to_end(log)
            rest = memoryview(data)
            while rest:
                rest = rest[self._open[log].write(rest) :]
        except OSError as error:
            return error
        return len(data)

    def _close_all(self) -> list[_Written]:
        results = [self._close(*item) for item in self._open.items()]
        self._open.clear()
        return results

    def _close(self, log: _Log, file: IO[bytes]) -> _Written:
        try:
            file.close()
        except OSError as error:
            return log, error
        return log, 0


def _note_written(results: list[_Written]) -> None:
    for log, written in results:
        if isinstance(written, OSError):
            log.give_up(written)
        else:
            log.on_written(written)


class RankOutput:
    """Output of one rank of one attempt, shown on the console and written to a file.

    file: its directory must exist.
    width: width of the rank in front of each line.
    shown: False keeps the output off the console.
    host: name of the host in front of each line; empty for none.
    logs: writes the file.
    """

    def __init__(
        self,
        rank: int,
        file: Path,
        *,
        width: int = 1,
        shown: bool = True,
        host: str = "",
        logs: LogFiles | None = None,
    ) -> None:
        self._shown = shown
        self._prefix = f"[rank {rank:>{width}}{' ' * bool(host)}{host}] ".encode()
        self._prefix_of_torch = f"[rank{rank}]:".encode()
        self._log = _Log(file)
        self._logs = logs or LogFiles(Background(None, "log"))
        self._streams = _new_streams()
        self._last: deque[tuple[int, bytes]] = deque()
        """The stream and the bytes of the last pieces of output."""
        self._last_bytes = 0

    def feed(self, stream: int, data: bytes) -> None:
        """Take bytes that the rank wrote to stdout (1) or stderr (2)."""
        self._logs.add(self._log, data)
        self._keep(stream, data)
        if self._shown:
            self._show(stream, self._streams[stream].feed(data, time.monotonic()))

    def note(self, text: str) -> None:
        """Write a text to the file only, on lines of its own."""
        self._logs.add(self._log, b"\n" * self._log.mid_line + text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Have the new output written."""
        self._logs.flush()

    def end(self) -> None:
        """Show the last line, even without a line end."""
        for number, stream in self._streams.items():
            self._show(number, stream.end())

    def close(self) -> None:
        """End the output and close the file."""
        self.end()
        self._logs.close()

    def _show(self, stream: int, block: bytes) -> None:
        if block:
            lines = self._clean(block)[:-1].replace(b"\n", b"\n" + self._prefix)
            print_to(sys.stdout if stream == 1 else sys.stderr, b"".join((self._prefix, lines, b"\n")))

    def _clean(self, block: bytes) -> bytes:
        """Return lines without what must not be shown, and without the prefix of torch."""
        block = _clean(block)
        if self._prefix_of_torch in block:
            for prefix in (self._prefix_of_torch + b" ", self._prefix_of_torch):
                block = (b"\n" + block).replace(b"\n" + prefix, b"\n")[1:]
        return block

    # -- the last lines -------------------------------------------------------------------------------------------

    def _keep(self, stream: int, data: bytes) -> None:
        """Keep the piece and drop old ones. Most runs need no last lines, so that only :attr:`last_lines` cuts them."""
        data = data[-_BYTES_KEPT:]
        self._last_bytes += len(data)
        if self._last and self._last[-1][0] == stream and len(self._last[-1][1]) < _SMALL_PIECE:
            data = self._last.pop()[1] + data
        self._last.append((stream, data))
        while self._last_bytes - len(self._last[0][1]) >= _BYTES_KEPT or len(self._last) > _PIECES_KEPT:
            self._last_bytes -= len(self._last.popleft()[1])

    @property
    def last_lines(self) -> list[str]:
        """The last lines, cut to a length that fits a failure screen."""
        streams = _new_streams()
        blocks = [streams[number].feed(piece, 0.0) for number, piece in self._last]
        blocks += [stream.end() for stream in streams.values()]
        lines = self._clean(b"".join(blocks)).decode().split("\n")[:-1]
        return [line[:_LONGEST_KEPT] for line in lines[-_LINES_KEPT:]]


def _new_streams() -> dict[int, _Stream]:
    return {1: _Stream(), 2: _Stream()}


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
        self._logs = LogFiles(background)
        self._shown = None if shown is None else frozenset(shown)
        self.begin(-1, [])

    def begin(self, attempt: int, hosts: Sequence[str]) -> None:
        """Begin an attempt. The last one must be closed.

        hosts: the host of each rank.
        """
        self._attempt = attempt
        self._hosts = hosts
        self._width = len(str(len(hosts) - 1))
        self._has_many_hosts = len(set(hosts)) > 1
        self._ranks: dict[int, RankOutput] = {}
        """The ranks that have printed something, or have exited."""

    def of(self, rank: int) -> RankOutput:
        """Return the output of a rank. The next :meth:`flush` writes what is added to it."""
        if rank not in self._ranks:
            self._ranks[rank] = RankOutput(
                rank,
                self._file_of(self._attempt, rank),
                width=self._width,
                shown=self._shown is None or rank in self._shown,
                host=self._hosts[rank] if self._has_many_hosts else "",
                logs=self._logs,
            )
        return self._ranks[rank]

    def last_lines(self) -> dict[int, list[str]]:
        """Return the last lines of the ranks, for a failure screen."""
        return {rank: output.last_lines for rank, output in self._ranks.items()}

    def flush(self) -> None:
        self._logs.flush()

    def close(self) -> None:
        for output in self._ranks.values():
            output.end()
        self._logs.close()


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

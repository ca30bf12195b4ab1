"""Output of the workers: whole lines with the rank on the console, and raw bytes in one file per rank.

Runs in: coordinator.
"""

from __future__ import annotations

import re
import time
from collections import deque
from typing import TYPE_CHECKING

from distrain.console.log_files import Log, LogFiles
from distrain.system.background import Background
from distrain.system.text import without_controls

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from distrain.console.run_console import RunConsole

_LONGEST_LINE = 64 << 10
_LONGEST_BAR = 1 << 10
_LINES_KEPT = 300
_LONGEST_KEPT = 2 << 10
_BYTES_KEPT = 48 << 10
"""The last output of a rank, from which its last lines are taken."""
_PIECES_KEPT = 1000
_SMALL_PIECE = 4 << 10
PROGRESS_INTERVAL_S = 30.0
"""Seconds between two states of a progress bar on the console."""
_INNER_BAR = re.compile(rb"\n+\r([^\n]*?)(?:\x1b\[A)+")
"""A state of a bar below the open one, as tqdm draws it: down, the state, and up again."""
_CONTROL_BYTES = bytes(byte for byte in range(0x80) if not without_controls(chr(byte)))


class _Stream:
    """A cutter of bytes into blocks of whole lines.

    Of a line that stays open, such as a progress bar, it returns the current state every :data:`PROGRESS_INTERVAL_S`,
    unless a footer shows it.
    """

    def __init__(self, *, has_footer: bool = False) -> None:
        self._has_footer = has_footer
        self._rest = b""
        self._shown_at = 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        begins = not self._rest
        end = data.rfind(b"\n") + 1
        block, self._rest = (self._rest + data[:end], data[end:]) if end else (b"", self._rest + data)
        if block or begins:
            self._shown_at = now
        is_due = self.is_bar and not self._has_footer and now >= self._shown_at + PROGRESS_INTERVAL_S
        if is_due or len(self._rest) > _LONGEST_LINE:
            self._shown_at = now
            block += self.end()
        return block

    @property
    def is_bar(self) -> bool:
        """True if the open line is a progress bar."""
        return b"\r" in self._rest

    @property
    def bar(self) -> bytes:
        """The state of the progress bar that is open, or nothing."""
        return _clean(self._rest[-_LONGEST_BAR:]) if self.is_bar else b""

    def end(self) -> bytes:
        """Return the open line, ended."""
        rest, self._rest = self._rest, b""
        return rest + b"\n" if rest else b""


def _as_state(inner: re.Match[bytes]) -> bytes:
    """Return the state of an inner bar as one of the open line, which goes on; nothing if it was wiped out."""
    return b"\r" + inner[1] if inner[1].strip() else b""


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


class ShownOutput:
    """Output of one rank of one attempt on its way to the console: whole lines, and the state of a progress bar."""

    def __init__(self, rank: int, console: RunConsole) -> None:
        self._rank = rank
        self._console = console
        self._streams = _new_streams(has_footer=console.has_footer)

    def feed(self, stream: int, data: bytes) -> None:
        """Take bytes that the rank wrote to stdout (1) or stderr (2)."""
        now, cutter = time.monotonic(), self._streams[stream]
        had_bar = cutter.is_bar
        self._show(stream, cutter.feed(data, now))
        self._console.status.heard_of(self._rank, now)
        if had_bar or cutter.is_bar:
            self._console.status.ranks[self._rank].bar = cutter.bar.decode()

    def end(self) -> None:
        """Show the last line, even without a line end."""
        for number, stream in self._streams.items():
            self._show(number, stream.end())

    def _show(self, stream: int, block: bytes) -> None:
        if block:
            self._console.print(self._rank, stream, readable(block, self._rank), is_bar=b"\r" in block)


def readable(block: bytes, rank: int) -> bytes:
    """Return lines of a rank without what must not be shown, and without the prefix of torch."""
    block, prefix_of_torch = _clean(block), f"[rank{rank}]:".encode()
    if prefix_of_torch in block:
        for prefix in (prefix_of_torch + b" ", prefix_of_torch):
            block = (b"\n" + block).replace(b"\n" + prefix, b"\n")[1:]
    return block


class RankOutput:
    """Output of one rank of one attempt, shown on the console and written to a file.

    file: its directory must exist.
    console: shows the lines; None keeps them off the console.
    logs: writes the file.
    """

    def __init__(self, rank: int, file: Path, *, console: RunConsole | None, logs: LogFiles | None = None) -> None:
        self._rank = rank
        self._shown = None if console is None else ShownOutput(rank, console)
        self._log = Log(file)
        self._logs = logs or LogFiles(Background(None, "log"))
        self._last: deque[tuple[int, bytes]] = deque()
        """The stream and the bytes of the last pieces of output."""
        self._last_bytes = 0
        self._bar_stream: int | None = None
        """The stream of the progress bar with which the log ends, or None."""

    def feed(self, stream: int, data: bytes) -> None:
        """Take bytes that the rank wrote to stdout (1) or stderr (2)."""
        if b"\x1b" in data and b"\x1b[A" in data:
            data = _INNER_BAR.sub(_as_state, data)
        if self._bar_stream not in (None, stream):  # as tqdm expects, the line replaces the bar
            self._logs.add(self._log, b"\r")
        end = data.rfind(b"\n") + 1
        is_bar = b"\r" in data[end:] or (not end and self._bar_stream == stream)
        self._bar_stream = stream if is_bar else None
        self._logs.add(self._log, data)
        self._keep(stream, data)
        if self._shown is not None:
            self._shown.feed(stream, data)

    def note(self, text: str) -> None:
        """Write a text to the file only, on lines of its own."""
        self._logs.add(self._log, b"\n" * self._log.mid_line + text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Have the new output written."""
        self._logs.flush()

    def end(self) -> None:
        """Show the last line, even without a line end."""
        if self._shown is not None:
            self._shown.end()

    def close(self) -> None:
        """End the output and close the file."""
        self.end()
        self._logs.close()

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
        lines = readable(b"".join(blocks), self._rank).decode().split("\n")[:-1]
        return [line[:_LONGEST_KEPT] for line in lines[-_LINES_KEPT:]]


def _new_streams(*, has_footer: bool = False) -> dict[int, _Stream]:
    return {number: _Stream(has_footer=has_footer) for number in (1, 2)}


class WorkerOutput:
    """Output of all ranks, of one attempt after the other.

    file_of: returns the log file of an attempt and a rank.
    background: writes the files.
    shown: the ranks whose output is shown on the console; None for all.
    """

    def __init__(
        self,
        file_of: Callable[[int, int], Path],
        background: Background,
        console: RunConsole,
        shown: Collection[int] | None = None,
    ) -> None:
        self._file_of = file_of
        self._logs = LogFiles(background)
        self._console = console
        self._shown = None if shown is None else frozenset(shown)
        self.begin(-1)

    def begin(self, attempt: int) -> None:
        """Begin an attempt. The last one must be closed."""
        self._attempt = attempt
        self._ranks: dict[int, RankOutput] = {}
        """The ranks that have printed something, or have exited."""

    def of(self, rank: int) -> RankOutput:
        """Return the output of a rank. The next :meth:`flush` writes what is added to it."""
        if rank not in self._ranks:
            self._ranks[rank] = RankOutput(
                rank,
                self._file_of(self._attempt, rank),
                console=self._console if self._shown is None or rank in self._shown else None,
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

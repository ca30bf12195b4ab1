"""The output of the ranks: a log file for each rank, and its last lines for failures. Runs in: coordinator."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from distrain import wire
from distrain.api.observer import Printed
from distrain.decisions.events import AttemptEnded, AttemptStarts
from distrain.decisions.hearing import hears
from distrain.storage.ownership import open_without_links
from distrain.system.log import warn
from distrain.system.output_lines import LineCutter, readable, with_one_bar
from distrain.system.stacks import last_words

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distrain.api.observer import Fact
    from distrain.system.background import Background

_MOST_UNWRITTEN_BYTES = 64 << 20
"""Output of a rank that may wait for a slow disk. More output is left out of the log."""
_LINES_KEPT = 300
_LONGEST_KEPT = 2 << 10
_BYTES_KEPT = 48 << 10
"""The last output of a rank, from which its last lines are taken."""
_PIECES_KEPT = 1000
_SMALL_PIECE = 4 << 10


class RankLog:
    """The output of one rank of one attempt: what is not written to its file yet, and its last lines."""

    def __init__(self, rank: int, path: Path) -> None:
        self.path = path
        self._rank = rank
        self._is_broken = False
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = self._left_out_bytes = 0
        self._is_mid_line = False
        self._bar_stream: int | None = None
        """The stream of the progress bar with which the log ends, or None."""
        self._last: deque[tuple[int, bytes]] = deque()
        """The stream and the bytes of the last pieces of output."""
        self._last_bytes = 0

    def feed(self, stream: int, data: bytes) -> None:
        """Take bytes that the rank wrote to stdout (1) or stderr (2)."""
        if self._bar_stream not in (None, stream):  # as tqdm expects, the line replaces the bar
            self._add(b"\r")
        end = data.rfind(b"\n") + 1
        is_bar = b"\r" in data[end:] or (not end and self._bar_stream == stream)
        self._bar_stream = stream if is_bar else None
        self._add(data)
        self._keep(stream, data)

    def note(self, text: str) -> None:
        """Write a text to the file only, on lines of its own."""
        self._add(b"\n" * self._is_mid_line + text.encode(errors="backslashreplace"))

    # -- the file -------------------------------------------------------------------------------------------------

    def _add(self, data: bytes) -> None:
        if self._unwritten_bytes > _MOST_UNWRITTEN_BYTES:
            self._left_out_bytes += len(data)
            return
        if self._left_out_bytes:
            text = f"\n... {self._left_out_bytes} bytes are left out here: the disk was too slow ...\n"
            self._left_out_bytes = 0
            data = text.encode() + data
        self._unwritten.append(data)
        self._unwritten_bytes += len(data)
        self._is_mid_line = not data.endswith(b"\n")

    def take(self) -> bytes:
        """Return the output that nobody has taken yet, to be written."""
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        return b"" if self._is_broken else data

    def on_written(self, written: int | OSError) -> None:
        """Note how many bytes were written, or why they were not. Training does not depend on the log."""
        if isinstance(written, int):
            self._unwritten_bytes -= written
            return
        if not self._is_broken:
            warn(f"the log {self.path} can no longer be written: {written}")
        self._is_broken, self._unwritten_bytes = True, 0

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
        streams = {number: LineCutter() for number in (1, 2)}
        blocks = [streams[number].feed(piece, 0.0) for number, piece in self._last]
        blocks += [stream.end() for stream in streams.values()]
        lines = readable(b"".join(blocks), self._rank).decode().split("\n")[:-1]
        return [line[:_LONGEST_KEPT] for line in lines[-_LINES_KEPT:]]


_Written: TypeAlias = "tuple[RankLog, int | OSError]"


class RankLogs:
    """Output of all ranks, of one attempt after the other.

    file_of: returns the log file of an attempt and a rank. background: its thread writes the files. tell: tells
    observers a fact. keeps: False for logs without tracebacks.
    """

    def __init__(
        self,
        file_of: Callable[[int, int], Path],
        background: Background,
        tell: Callable[[Fact], None],
        *,
        keeps: bool = True,
    ) -> None:
        self._file_of = file_of
        self._background = background
        self._tell = tell
        self._keeps = keeps
        self.begin(-1)

    @hears(AttemptStarts)
    def on_attempt(self, _: str, starts: AttemptStarts) -> None:
        """Begin the logs of an attempt."""
        self.begin(starts.attempt)

    @hears(AttemptEnded)
    def on_attempt_end(self, _: str, ended: AttemptEnded) -> None:
        """Have all output written."""
        self.flush()

    @hears(wire.Output)
    def on_output(self, _: str, message: wire.Output) -> None:
        """Take output of a rank, and tell observers."""
        data = with_one_bar(message.body)
        self.of(message.rank).feed(message.stream, data)
        self._tell(Printed(message.rank, message.stream, data, time.monotonic()))

    @hears(wire.Outcome)
    def on_outcome(self, _: str, outcome: wire.Outcome) -> None:
        """Add the traceback of a rank to its log."""
        if outcome.traceback and self._keeps:
            self.of(outcome.rank).note(outcome.traceback)

    def begin(self, attempt: int) -> None:
        """Begin an attempt, after the output of the last one was flushed."""
        self._attempt = attempt
        self._ranks: dict[int, RankLog] = {}
        """The ranks that have printed something, or have exited."""
        self._changed: dict[RankLog, None] = {}

    def of(self, rank: int) -> RankLog:
        """Return the log of a rank. The next :meth:`flush` writes what is added to it."""
        if rank not in self._ranks:
            self._ranks[rank] = RankLog(rank, self._file_of(self._attempt, rank))
        self._changed[self._ranks[rank]] = None
        return self._ranks[rank]

    def last_words(self) -> dict[int, list[str]]:
        """Return the last output of each rank, for a failure screen."""
        return {rank: last_words(log.last_lines) for rank, log in self._ranks.items()}

    def flush(self) -> None:
        """Give all new output to the background, as one task."""
        batch = [(log, data) for log in self._changed if (data := log.take())]
        self._changed.clear()
        if batch:
            self._background.do(
                lambda: [(log, _append(log.path, data)) for log, data in batch],
                _note,
                lambda error: _note([(log, error) for log, _ in batch]),  # no thread
            )


def _note(results: list[_Written]) -> None:
    for log, written in results:
        log.on_written(written)


def _append(path: Path, data: bytes) -> int | OSError:
    try:
        with open(path, "ab", opener=open_without_links) as file:
            file.write(data)
    except OSError as error:
        return error
    return len(data)

"""The log file of each rank, with everything that the rank prints. Runs in: coordinator."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import IO, TYPE_CHECKING, TypeAlias

from distrain.storage.ownership import open_without_links
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distrain.system.background import Background

_MOST_UNWRITTEN_BYTES = 64 << 20
"""Output of a rank that may wait for a slow disk. More output is left out of the log."""
_MOST_OPEN_LOGS = 64


class Log:
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


_Written: TypeAlias = "tuple[Log, int | OSError]"
"""The number of bytes that were written to a log, or why they were not."""


class LogFiles:
    """The log files of the ranks. The thread of ``background`` writes them, and keeps few of them open."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._changed: dict[Log, None] = {}
        self._open: OrderedDict[Log, IO[bytes]] = OrderedDict()
        """Used by the thread only. The file that was written last is the last one."""

    def add(self, log: Log, data: bytes) -> None:
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

    def _do(self, work: Callable[[], list[_Written]], logs: list[Log]) -> None:
        def give_up(error: OSError) -> None:  # there is no thread
            for log in logs:
                log.give_up(error)

        self._background.do(work, _note_written, give_up)

    # -- in the thread --------------------------------------------------------------------------------------------

    def _write(self, batch: list[tuple[Log, bytes]]) -> list[_Written]:
        results: list[_Written] = []
        for log, data in batch:
            if data:
                results.append((log, self._append(log, data)))
            if len(self._open) > _MOST_OPEN_LOGS:
                results.append(self._close(*self._open.popitem(last=False)))
        return results

    def _append(self, log: Log, data: bytes) -> int | OSError:
        try:
            if log not in self._open:
                self._open[log] = open(log.path, "ab", buffering=0, opener=open_without_links)  # noqa: SIM115
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

    def _close(self, log: Log, file: IO[bytes]) -> _Written:
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

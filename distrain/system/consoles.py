"""Threads that write to the consoles, so that Ctrl-S in a terminal or a paused ``less`` does not stop a run.

Runs in: coordinator.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from collections import deque
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_QUEUED_BYTES = 4 << 20
"""Output that may wait for a slow console. After that callers wait, and then leave lines out."""
_WRITE_BYTES = 64 << 10
"""Pieces of output that are written together."""
_PATIENCE_S = 0.1
"""Seconds to wait for a slow console. After that no caller waits until the console accepts output again."""

_lock = threading.Lock()
_writers: dict[tuple[int, int], _Writer] = {}
"""Writers by device and inode: stdout and stderr are often one terminal, which needs one order of lines."""
_runs = 0


@contextlib.contextmanager
def console_threads() -> Iterator[None]:
    """Write to the consoles in threads within the block. At its end, wait until the consoles show everything."""
    global _runs
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()  # earlier output of the user comes first
    with _lock:
        _runs += 1
    try:
        yield
    finally:
        try:
            for writer in list(_writers.values()):
                writer.drain()
        finally:
            with _lock:
                _runs -= 1
                if not _runs:
                    for writer in _writers.values():
                        writer.close()
                    _writers.clear()


def write_to(console: IO[str], text: str | bytes) -> None:
    """Print text, through the console's thread if there is one. Raises OSError or ValueError for a closed console.

    text: bytes must be UTF-8. Most consoles need no other encoding.
    """
    encoding = getattr(console, "encoding", None) or "utf-8"
    if isinstance(text, bytes) and encoding.lower() not in ("utf-8", "utf8"):
        text = text.decode()
    data = text if isinstance(text, bytes) else text.encode(encoding, errors="replace")
    writer = _writer_of(console)
    if writer is None:
        console.write(data.decode(encoding))
        console.flush()
    else:
        writer.add(data)


def _writer_of(console: IO[str]) -> _Writer | None:
    """Return the writer of a standard stream, or None if the caller should write itself.

    The caller writes outside of runs, and to streams that are not the interpreter's own, such as a notebook's.
    """
    if type(console) is not io.TextIOWrapper:
        return None
    with _lock:
        if not _runs:
            return None
        status = os.fstat(console.fileno())
        key = (status.st_dev, status.st_ino)
        if key not in _writers:
            try:
                _writers[key] = _Writer(os.dup(console.fileno()))
            except RuntimeError:  # the user may have no more threads
                return None
        return _writers[key]


class _Writer:
    """The thread that writes to one console, and its queue. It owns ``fd``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._lines_left_out = 0
        self._stuck = False
        self._ended = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="distrain-console", daemon=True).start()

    def add(self, data: bytes) -> None:
        with self._changed:
            if not (self._has_room() or self._stuck):
                self._stuck = not self._changed.wait_for(self._has_room, _PATIENCE_S)
            if self._has_room():
                self._report_lines_left_out()
                self._append(data)
            else:
                self._lines_left_out += data.count(b"\n")

    def _has_room(self) -> bool:
        return self._queued_bytes <= _MOST_QUEUED_BYTES

    def _append(self, data: bytes) -> None:
        self._queue.append(data)
        self._queued_bytes += len(data)
        self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything is shown."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queued_bytes)

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if self._ended:
                    os.close(self._fd)
                    return
                data = self._take()
            try:
                _write_all(self._fd, data)
            except OSError:  # the console is closed; the logs have everything
                with self._changed:
                    self._queue.clear()
                    self._queued_bytes = len(data)
            with self._changed:
                self._queued_bytes -= len(data)
                self._stuck = False
                if not self._queue:
                    self._report_lines_left_out()
                self._changed.notify_all()

    def _take(self) -> bytes:
        """Return the first pieces of the queue, to be written at once."""
        pieces = [self._queue.popleft()]
        size = len(pieces[0])
        while self._queue and size + len(self._queue[0]) <= _WRITE_BYTES:
            pieces.append(self._queue.popleft())
            size += len(pieces[-1])
        return b"".join(pieces)

    def _report_lines_left_out(self) -> None:
        if self._lines_left_out:
            text = f"{self._lines_left_out} lines are not shown, as this console was too slow; the logs have them"
            self._lines_left_out = 0
            self._append(f"distrain: {text}\n".encode())


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another program has made the terminal non-blocking
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()

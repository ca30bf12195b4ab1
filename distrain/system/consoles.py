"""Consoles that are written by threads, so that a terminal after Ctrl-S or a paused ``less`` stops nobody.

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

_MOST_UNSHOWN_BYTES = 4 << 20
"""A console that is further behind is waited for, and then misses lines."""
_PATIENCE_S = 0.1
"""Longest wait for a console; after it, nobody waits until the console has taken something again."""

_lock = threading.Lock()
_writers: dict[tuple[int, int], _Writer] = {}
"""By device and inode: stdout and stderr are often one terminal, whose lines stay in order."""
_runs = 0


@contextlib.contextmanager
def unblocked_consoles() -> Iterator[None]:
    """Within the block, :func:`show` hardly ever waits. At its end, wait until the consoles show everything."""
    global _runs
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()  # what the user has printed comes first
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


def show(console: IO[str], text: str) -> None:
    """Print text. Raises OSError or ValueError if the console has gone away."""
    encoding = getattr(console, "encoding", None) or "utf-8"
    data = text.encode(encoding, errors="replace")
    writer = _writer_of(console)
    if writer is None:
        console.write(data.decode(encoding))
        console.flush()
    else:
        writer.add(data)


def _writer_of(console: IO[str]) -> _Writer | None:
    """Return the thread's queue for a standard stream; None for a notebook's or a user's own stream, which is written
    by the caller.
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
            except RuntimeError:  # as many threads as the user may have
                return None
        return _writers[key]


class _Writer:
    """The thread that writes to one console, and what it has yet to write. It owns ``fd``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unshown: deque[bytes] = deque()
        self._unshown_bytes = 0
        self._missed_lines = 0
        self._stuck = False
        self._ended = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="distrain-console", daemon=True).start()

    def add(self, data: bytes) -> None:
        with self._changed:
            if not (self._has_room() or self._stuck):
                self._stuck = not self._changed.wait_for(self._has_room, _PATIENCE_S)
            if self._has_room():
                self._say_what_was_missed()
                self._append(data)
            else:
                self._missed_lines += data.count(b"\n")

    def _has_room(self) -> bool:
        return self._unshown_bytes <= _MOST_UNSHOWN_BYTES

    def _append(self, data: bytes) -> None:
        self._unshown.append(data)
        self._unshown_bytes += len(data)
        self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything is shown."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unshown_bytes)

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unshown or self._ended)
                if self._ended:
                    os.close(self._fd)
                    return
                data = self._unshown.popleft()
            try:
                _write_all(self._fd, data)
            except OSError:  # it has gone away; the logs have everything
                with self._changed:
                    self._unshown.clear()
                    self._unshown_bytes = len(data)
            with self._changed:
                self._unshown_bytes -= len(data)
                self._stuck = False
                if not self._unshown:
                    self._say_what_was_missed()
                self._changed.notify_all()

    def _say_what_was_missed(self) -> None:
        if self._missed_lines:
            text = f"{self._missed_lines} lines are not shown, as this console was too slow; the logs have them"
            self._missed_lines = 0
            self._append(f"distrain: {text}\n".encode())


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # somebody has made the terminal non-blocking
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()

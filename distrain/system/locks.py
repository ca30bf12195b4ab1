"""Locks of local files and directories. Runs in: anywhere.

They are taken with flock: when a process is killed, the kernel releases them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_POLL_S = 0.025


def lock(fd: int, how: int) -> bool:
    """Lock an open file. Return False on a file system without locks.

    Raise BlockingIOError if another process has locked it, and ``how`` says not to wait.
    """
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def lock_alone(fd: int, deadline: float) -> bool:
    """Lock an open file exclusively, by a time of time.monotonic(). Return False on a file system without locks.

    Raise BlockingIOError if another process still has a lock then.
    """
    while True:
        try:
            return lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def lock_path(path: str | Path, how: int, flags: int = os.O_DIRECTORY | os.O_NOFOLLOW) -> int | None:
    """Lock what is at a path. Return its descriptor, which keeps the lock until it is closed.

    Return None if there is nothing, if another process has just deleted or replaced it, or if another one has locked it
    and ``how`` says not to wait. Raise OSError if it cannot be opened. flags: those to open it with; by default, it has
    to be a directory and no link.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock(fd, how)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                stack.pop_all()
                return fd
    return None


@contextlib.contextmanager
def locked_directory(folder: Path) -> Iterator[None]:
    """Make a directory that others may delete, and hold a shared lock on it."""
    fd = None
    while fd is None:
        with contextlib.suppress(FileExistsError):  # mkdir(exist_ok=True) raises it if another process deletes it now
            folder.mkdir()
        fd = lock_path(folder, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_file(path: str) -> Iterator[int]:
    """Make a file, hold its lock alone, and delete it afterwards. Give the descriptor of the lock."""
    fd = None
    while fd is None:
        fd = lock_path(path, fcntl.LOCK_EX, os.O_RDWR | os.O_CREAT)
    try:
        yield fd
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(fd)


def is_locked(path: str | Path) -> bool:
    """Return False if no process holds the lock of a file, True if one does or if that is unknown.

    ``distrain ls`` asks this for every run, so this module imports little.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False

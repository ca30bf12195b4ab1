"""Locks of local files: take one, and ask whether somebody holds that of a run directory. Runs in: anywhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

from distrain.storage.names import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_POLL_S = 0.025


def lock_alone(fd: int, deadline: float) -> bool:
    """Lock an open file exclusively, by a time of time.monotonic(). Return False on a file system without locks.

    Raise BlockingIOError if another process still has a lock then.
    """
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
        except OSError:
            return False
        else:
            return True


@contextlib.contextmanager
def locked_directory(folder: Path) -> Iterator[int]:
    """Make a directory that others may delete, and hold a shared lock on it. A file system without locks has none."""
    while True:
        folder.mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            is_there = False
            with contextlib.suppress(FileNotFoundError):  # another process has deleted it just now
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                stack.callback(os.close, lock)
                with contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_SH)
                is_there = os.path.samestat(os.fstat(lock), folder.stat())
            if is_there:
                yield lock
                return


def is_locked(run: str | os.PathLike[str]) -> bool:
    """Return False if no process holds the lock of a run, True if one does or if that is unknown.

    ``distrain ls`` asks this for every run, so this module imports little.
    """
    try:
        fd = os.open(os.path.join(run, LOCK), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False

"""Locks of local files: take one, and ask whether somebody holds that of a run directory. Runs in: anywhere."""

from __future__ import annotations

import fcntl
import os
import time

from distrain.storage.names import LOCK

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

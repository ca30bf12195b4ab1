"""The question whether somebody holds the lock of a local run directory. Runs in: anywhere."""

from __future__ import annotations

import fcntl
import os

from distrain.storage.names import LOCK


def is_locked(run: str | os.PathLike[str]) -> bool:
    """Return False if no process holds the lock of a run, True if one does or if that is unknown.

    ``distrain ls`` asks this for every run, so this module imports little.
    """
    try:
        fd = os.open(os.path.join(run, LOCK), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False

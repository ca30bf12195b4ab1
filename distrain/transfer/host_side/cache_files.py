"""Directories of the cache: locked and deleted. Runs in: agent, guard.

A process locks a directory as long as it uses it: together with others (``LOCK_SH``) or alone (``LOCK_EX``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system without locks."""


def lock_folder(path: Path, how: int) -> int | None:
    """Lock a directory, and note the time of its use. Return its descriptor, which keeps the lock until it is closed.

    Return None if there is no such directory, or if another process has locked it or just deleted it. On a file system
    without locks, every process gets the lock. Raise OSError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        try_lock(fd, how)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            with contextlib.suppress(OSError):  # it may be read-only
                os.utime(fd)
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def try_lock(fd: int, how: int) -> None:
    """Lock a descriptor. Raise BlockingIOError if another process has locked it."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise


def delete(path: str | Path) -> None:
    """Delete whatever is there, as far as possible. Follow no links."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
        return
    for parent, _, _ in os.walk(path):
        with contextlib.suppress(OSError):  # directories in it may be read-only
            os.chmod(parent, 0o700)
    shutil.rmtree(path, ignore_errors=True)

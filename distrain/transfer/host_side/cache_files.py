"""Files and directories of the cache: locked, deleted, and made where workers may have put something else.

Runs in: agent, guard.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def explaining_full_disk(root: Path) -> Iterator[None]:
    """Add the directory of the cache and the cure to an OSError that says that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"{error.strerror} for {root}, where distrain keeps the files of runs on this host; free some space there, "
            "or name a directory on another disk with env.DISTRAIN_CACHE= in the hostfile",
        ) from error


def try_lock(path: Path) -> int | None:
    """Make and lock a file. Return its descriptor, or None if a process has locked or just deleted it. Raise OSError.

    Forked processes share the lock. It is free when all have ended, or after :func:`unlock` in any of them.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return None


def unlock(fd: int) -> None:
    """Free a lock of :func:`try_lock`, also for forked processes."""
    with contextlib.suppress(OSError):  # without locks
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def delete(path: str | Path) -> None:
    """Delete whatever is there, as far as possible. Follow no links."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
    except OSError:
        return
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):  # directories in it may be read-only
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
        for parent, folders, _ in os.walk(path):
            for name in folders:
                with contextlib.suppress(OSError):
                    open_up(os.path.join(parent, name))
        shutil.rmtree(path, ignore_errors=True)


def open_up(folder: str) -> os.stat_result:
    """Let the owner do everything in a directory. Return the status of what is there, not of what a link leads to.

    Raise OSError.
    """
    status = os.lstat(folder)
    if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o700 != 0o700:
        os.chmod(folder, stat.S_IMODE(status.st_mode) | 0o700)
    return status


def make_directory(path: str) -> None:
    """Make a directory, in place of anything else with that name. Raise OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(open_up(path).st_mode):
            return
        os.unlink(path)
    with contextlib.suppress(FileExistsError):  # another process, which claims the same run
        os.mkdir(path, 0o700)

"""Run directories that somebody else may have prepared, where others may write to the storage path.

Runs in: coordinator, tracker, and the commands that write into run directories.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from distrain.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path


def open_without_links(path: str | Path, flags: int) -> int:
    """Open a file of a run directory, as the ``opener`` of ``open()``. Raise OSError for anything but a file."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except BlockingIOError:  # a client of this file server has borrowed the file: wait for its return
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path} is a link, and distrain does not write through links; delete it") from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads
            raise _not_a_file(path) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_a_file(path)
    return fd


def _not_a_file(path: str | Path) -> OSError:
    return OSError(f"{path} is not a regular file; delete it")


def check_owners(run: Path) -> None:
    """Raise StorageError for a directory that a stranger has made where everybody may write, or for a stranger's link.

    The user, root and the owner of the directory above are not strangers. Raise OSError if the owners cannot be found
    out. ``run`` need not exist.
    """
    above = run.parent.stat()
    try:
        status = run.lstat()
    except FileNotFoundError:
        return
    may_be_strange = stat.S_ISLNK(status.st_mode) or above.st_mode & stat.S_IWOTH
    if status.st_uid in (os.geteuid(), 0, above.st_uid) or not may_be_strange:
        return
    raise StorageError(
        f"{run} belongs to another user (uid {status.st_uid}), and is a link, or everybody may write to {run.parent}: "
        "it may be a trap. Choose another name (RunConfig.name), or a RunConfig.storage_path to which only you or your "
        "group may write"
    )

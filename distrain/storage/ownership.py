"""Run directories that somebody else may have prepared, where others may write to the storage path.

Runs in: coordinator, tracker, and the commands that write into run directories.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
import tempfile
from typing import TYPE_CHECKING

from distrain.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable
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
    """Raise StorageError if a stranger may have prepared a directory to have this process overwrite the user's files.

    The user, root and the owner of the directory above are not strangers. Others are if everybody may write to that
    directory, and their links are never followed. Raise OSError if the owners cannot be found out.

    run: the directory, which need not exist. What is in it is checked, too.
    """
    _check(run.parent, [run])
    if run.exists():
        is_for_all = run.stat().st_mode & stat.S_IWOTH
        with os.scandir(run) as entries:  # knows links without a request to a file server for each checkpoint
            _check(run, [run / entry.name for entry in entries if is_for_all or entry.is_symlink()])


def _check(folder: Path, paths: Iterable[Path]) -> None:
    its = folder.stat()
    own = {os.geteuid(), 0, its.st_uid}
    is_for_all = bool(its.st_mode & stat.S_IWOTH)
    for path in paths:
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        is_link = stat.S_ISLNK(status.st_mode)
        if status.st_uid in own or not (is_link or is_for_all):
            continue
        with contextlib.suppress(OSError):
            own.add(_owner_of_new_files(folder))
        if status.st_uid not in own:
            raise StorageError(_refusal(folder, path, status.st_uid, is_link=is_link))


def _owner_of_new_files(folder: Path) -> int:
    """Return the owner of files that this process makes. A file server may make it another one than the user."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid


def _refusal(folder: Path, path: Path, uid: int, *, is_link: bool) -> str:
    try:
        owner = f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        owner = f"uid {uid}"
    if is_link:
        return (
            f"{path} is a link that belongs to {owner}: a run would overwrite what it leads to. Delete it, or choose "
            "another name (RunConfig.name) or RunConfig.storage_path"
        )
    return (
        f"{path} belongs to {owner}, and everybody may write to {folder}: it may be a trap. Choose another name "
        "(RunConfig.name), or a RunConfig.storage_path to which only you or your group may write"
    )

"""Run directories that somebody else may have prepared, where others may write to the storage path. Runs in: anywhere.

Readers of such a run may show, send or store what is in it. So it must not lead to files that its makers couldn't read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_NAMES = 100_000
_LOOK = os.O_PATH | os.O_CLOEXEC
"""Opens only a name, so it neither waits for a pipe nor disturbs a device."""
_OPEN = "/proc/self/fd/"


def open_to_read(
    path: str | Path, run: str | Path | None = None, *, below: str | Path | None = None, is_folder: bool = False
) -> int:
    """Open a file of a run, or a directory (``is_folder``), and return its descriptor.

    run: the run directory; by default that of the file. below: a directory elsewhere with the file, named by the run.

    Raise FileNotFoundError if there is no regular file, PermissionError for what may be a stranger's trap, OSError.
    """
    above, name = os.path.split(path)
    names = [name] if run is None else os.path.relpath(path, below or run).split(os.sep)
    at, top = _look_at_run(below or run or above or ".")
    try:
        is_safe = not below or run is None or os.stat(run).st_uid in (os.geteuid(), 0, top.st_uid)
        for name in names if is_safe else ():
            inner, found, link = _look(name, at)
            os.close(at)
            at, is_safe = inner, is_safe and _is_safe(found, link, top)
        mode = os.fstat(at).st_mode
        if stat.S_ISFIFO(mode):  # release a writer that waits for a reader
            os.close(os.open(f"{_OPEN}{at}", os.O_RDONLY | os.O_NONBLOCK))
        if not is_safe:
            raise _not_safe(path)
        if stat.S_ISDIR(mode) and not is_folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(mode):
            raise FileNotFoundError(errno.ENOENT, f"not a {'directory' if is_folder else 'regular file'}", str(path))
        return os.open(f"{_OPEN}{at}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(at)


def _look_at_run(run: str | Path) -> tuple[int, os.stat_result]:
    """Return a descriptor of a run directory, and its status. Raise PermissionError for a stranger's link."""
    at, status, link = _look(str(run))
    if link is not None and link.st_uid not in (os.geteuid(), 0, status.st_uid):
        os.close(at)
        raise _not_safe(run)
    return at, status


def _not_safe(path: str | Path) -> PermissionError:
    return PermissionError(errno.EPERM, "another user has put or linked it there, so it is not read", str(path))


def _look(path: str, at: int | None = None) -> tuple[int, os.stat_result, os.stat_result | None]:
    """Return a descriptor of what is at a path, its status, and that of the link that leads there, if it is one."""
    try:
        fd = os.open(path, _LOOK | (0 if path.startswith(_OPEN) else os.O_NOFOLLOW), dir_fd=at)
    except ValueError as error:  # zeros, or what no name can have
        raise FileNotFoundError(errno.ENOENT, str(error), path) from None
    status = os.fstat(fd)
    if not stat.S_ISLNK(status.st_mode):
        return fd, status, None
    try:
        target = os.path.join(os.path.dirname(path), os.readlink("", dir_fd=fd))
        inner = os.open(target, _LOOK, dir_fd=at)
    finally:
        os.close(fd)
    return inner, os.fstat(inner), status


def _is_safe(found: os.stat_result, link: os.stat_result | None, top: os.stat_result) -> bool:
    """Return whether a file found in a run directory (``top``) can be shown to everybody who may read that directory.

    In a stranger's directory, a link, or a second name of a file, may lead to what only the user may read. In the
    user's own, strangers may have put files if everybody may write there; a group that may write is trusted.
    """
    own = os.geteuid(), 0
    if link is not None:
        return link.st_uid == top.st_uid and (top.st_uid in own or found.st_uid == top.st_uid)
    is_trusted = found.st_uid in own or top.st_mode & (stat.S_IWGRP | stat.S_IWOTH) == stat.S_IWGRP
    has_one_name = found.st_nlink == 1 or stat.S_ISDIR(found.st_mode)
    return found.st_uid == top.st_uid or (is_trusted and (has_one_name or top.st_uid in own))


def list_names(folder: str | Path, run: str | Path | None, below: str | Path | None = None) -> list[str]:
    """Return the names in a directory of a run as :func:`open_to_read` finds it; none if there is no such directory."""
    try:
        fd = open_to_read(folder, run, below=below, is_folder=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        names = os.listdir(fd)
    finally:
        os.close(fd)
    if len(names) > MOST_NAMES:
        warnings.warn(f"{len(names) - MOST_NAMES:,} more files in {folder} were left out", stacklevel=2)
    return names[:MOST_NAMES]


@contextlib.contextmanager
def pinned(folder: Path) -> Iterator[Path]:
    """Give a path that keeps leading to the same directory, even if another one gets its name. Raise OSError."""
    fd, _ = _look_at_run(folder)
    try:
        yield Path(f"{_OPEN}{fd}")
    finally:
        os.close(fd)


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
    from distrain.errors import StorageError  # `distrain ls` does not need it

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

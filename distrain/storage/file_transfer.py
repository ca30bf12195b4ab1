"""How a rank's files get into the run directory: copied, moved, or hashed where they are. Runs in: worker, uploader."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.storage.files import copy_file, sync_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_NOT_BY_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
"""What link() says between file systems, and where there are no links."""
Files = list[tuple[str, int, int]]
"""Relative path, size in bytes, crc32."""


def file_copier(source: Path, target: Path, *, delete: bool) -> Callable[[str], tuple[int, int]]:
    """What brings a file, by its relative path, from one directory into the other, on disk for good, and returns its
    size and crc32. ``delete``: :func:`discard` is called once all are there, so that they need not be copied; until
    then the source stays whole.
    """
    if source == target:
        return lambda path: sync_file(target / path)
    if delete:
        return lambda path: _link(source, target, path)
    return lambda path: copy_file(source / path, target / path)


def _link(source: Path, target: Path, path: str) -> tuple[int, int]:
    """What is reached by a link, or has another name, is somebody else's, too: it is copied."""
    parts = [source / path, *(source / parent for parent in Path(path).parents)]
    if any(part.is_symlink() for part in parts) or parts[0].stat().st_nlink > 1:
        return copy_file(source / path, target / path)
    (target / path).parent.mkdir(parents=True, exist_ok=True)
    try:
        (target / path).hardlink_to(source / path)
    except OSError as error:
        if error.errno not in _NOT_BY_LINK:
            raise
        return copy_file(source / path, target / path)
    return sync_file(target / path)


def discard(source: Path, target: Path | None = None, paths: Sequence[str] = ()) -> None:
    """Delete the source, but nothing that is behind a link, nor behind ``source`` itself, if that is one. What cannot
    be deleted stays, and is no part of ``target`` any more (see :func:`unshare`). Raises OSError if that cannot be,
    ValueError for a path that means another directory in every process.
    """
    if not source.is_absolute():
        raise ValueError(f"what is deleted must be an absolute path, got {str(source)!r}")
    if source.is_symlink():
        source.unlink(missing_ok=True)
    else:
        shutil.rmtree(source, ignore_errors=True)
    unshare(target, paths)


def unshare(target: Path | None, paths: Sequence[str]) -> None:
    """Replace the files of ``target`` that have other names, too, by copies, so that nobody can write to them by those.
    Raises OSError.
    """
    for path in paths if target else ():
        assert target is not None
        if (target / path).stat().st_nlink > 1:
            copy = target / f"{path}.{uuid.uuid4().hex}"
            copy_file(target / path, copy)
            copy.replace(target / path)


class Leftover:
    """Local files that are to be deleted later, unless somebody has changed them by then."""

    def __init__(self, folder: Path) -> None:
        self.real = os.path.realpath(folder)
        self._folder = folder
        self._state = _state_of(folder)

    def discard(self) -> None:
        if _state_of(self._folder) == self._state:
            discard(self._folder)


def _state_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for parent, _, names in os.walk(folder):
        for path in (parent, *(os.path.join(parent, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):
                state = os.lstat(path)
                found[path] = (state.st_ino, state.st_size, state.st_mtime_ns)
    return found

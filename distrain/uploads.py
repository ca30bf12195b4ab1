"""How a rank's files get into the run directory: copied, moved, or hashed where they are. Runs in: worker, uploader."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.config import ValidationTaskConfig
from distrain.files import copy_file, sync_file
from distrain.runpaths import RunPaths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.checkpoint import Checkpoint

__all__ = ["CheckpointUploadMode", "Files", "Leftover", "Storing", "discard", "taker", "unshare"]

_NOT_BY_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
"""What link() says between file systems, and where there are no links."""
Files = list[tuple[str, int, int]]
"""Relative path, size in bytes, crc32."""


class CheckpointUploadMode(enum.Enum):
    """When ``distrain.report()`` returns, and who stores the files.

    SYNC: when this rank's files are in the run directory. ASYNC: at once; a process of its own stores them, and by
    default deletes the local ones then. NO_UPLOAD: the files are in a directory of the run directory already, and stay
    there.
    """

    SYNC = "SYNC"
    ASYNC = "ASYNC"
    NO_UPLOAD = "NO_UPLOAD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storing:
    """How ``report()`` is to store a checkpoint, as its caller says. Raises TypeError or ValueError for what cannot
    be."""

    name: str | None = None
    mode: CheckpointUploadMode = CheckpointUploadMode.SYNC
    delete: bool | None = None
    function: Callable[[Checkpoint, str], Checkpoint] | None = None
    validation: ValidationTaskConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, CheckpointUploadMode):
            raise TypeError(f"report(): checkpoint_upload_mode must be a CheckpointUploadMode, got {self.mode!r}")
        if self.delete is not None and not isinstance(self.delete, bool):
            raise TypeError(
                f"report(): delete_local_checkpoint_after_upload must be True, False or None, got {self.delete!r}"
            )
        if self.function is not None and not callable(self.function):
            raise TypeError(f"report(): checkpoint_upload_fn must be a function, got {self.function!r}")
        if self.validation is not None and not isinstance(self.validation, ValidationTaskConfig):
            raise TypeError(f"report(): validation must be a bool or a ValidationTaskConfig, got {self.validation!r}")
        if self.name is None:
            return
        if not isinstance(self.name, str):
            raise TypeError(f"report(): checkpoint_dir_name must be a str, got {self.name!r}")
        if (why_not := RunPaths(Path()).why_not(self.name)) is not None:
            raise ValueError(f"report(): checkpoint_dir_name {why_not}")

    @property
    def deletes(self) -> bool:
        return self.mode is CheckpointUploadMode.ASYNC if self.delete is None else self.delete


def taker(source: Path, target: Path, *, delete: bool) -> Callable[[str], tuple[int, int]]:
    """What brings a file, by its relative path, from one directory into the other, on disk for good, and returns its
    size and crc32. ``delete``: :func:`discard` is called once all are there, so that they need not be copied; until
    then the source stays whole."""
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
    ValueError for a path that means another directory in every process."""
    if not source.is_absolute():
        raise ValueError(f"what is deleted must be an absolute path, got {str(source)!r}")
    if source.is_symlink():
        source.unlink(missing_ok=True)
    else:
        shutil.rmtree(source, ignore_errors=True)
    unshare(target, paths)


def unshare(target: Path | None, paths: Sequence[str]) -> None:
    """Replace the files of ``target`` that have other names, too, by copies, so that nobody can write to them by those.
    Raises OSError."""
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

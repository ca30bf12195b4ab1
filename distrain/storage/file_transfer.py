"""Files of one rank on their way into a checkpoint: copied to it, and deleted where they came from.

Runs in: worker, uploader.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from typing import TYPE_CHECKING

from distrain.storage.files import copy_file, sync_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


Files = list[tuple[str, int, int]]
"""Relative path, size in bytes and crc32 of each file."""
_NEW_NS = 1_000_000_000
"""Nanoseconds since the last change for which a file may be changed again without a new modification time."""


def file_copier(source: Path, target: Path) -> Callable[[str], tuple[int, int]]:
    """Return a function that copies a file, given by its relative path, and returns its size and crc32.

    The copy is flushed to disk. If source and target are the same directory, the file is only flushed and hashed.
    """
    if source == target:
        return lambda path: sync_file(target / path)
    return lambda path: copy_file(source / path, target / path)


class LocalFiles:
    """The files in a directory as they are now, to be deleted once the checkpoint that has copies of them is committed.

    Nothing behind a symlink is deleted: of a symlink, including ``folder`` itself, only the link.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._files: dict[str, tuple[int, int, int]] = {}
        self._folders: dict[str, bool] = {}
        """By path: True if the directory was empty. A directory comes after those in it."""
        self._note(str(self.folder))

    def _note(self, path: str) -> None:
        """Remember a file, or a directory after all that is in it."""
        status = _dated(path)
        if stat.S_ISDIR(status.st_mode):
            entries = os.listdir(path)
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another rank deletes files of an earlier checkpoint
                    self._note(os.path.join(path, entry))
            self._folders[path] = not entries
        else:
            self._files[path] = _state(status)

    def overlaps(self, folder: Path) -> bool:
        """Return whether one of the two directories is the other or is in it."""
        first, second = (os.path.join(os.path.realpath(path), "") for path in (self.folder, folder))
        return first.startswith(second) or second.startswith(first)

    def delete(self) -> None:
        """Delete the files that nobody has changed or replaced since, and the directories that this makes empty.

        A file that cannot be deleted stays: the checkpoint does not need it any more. A directory that is empty for
        another reason stays, too: another rank may have made it anew.
        """
        emptied = {path for path, was_empty in self._folders.items() if was_empty}
        for path, state in self._files.items():
            with contextlib.suppress(OSError):
                if _state(os.lstat(path)) == state:
                    os.unlink(path)
                    emptied.add(os.path.dirname(path))
        for path in self._folders:
            with contextlib.suppress(OSError):
                if path in emptied:
                    os.rmdir(path)
                    emptied.add(os.path.dirname(path))


def _dated(path: str) -> os.stat_result:
    """Return the status of a file whose modification time differs from that of any later change.

    File systems take the time from a clock that ticks every few milliseconds. A new file is set back by 1 ns, so that a
    change within the same tick is noticed.
    """
    status = os.lstat(path)
    if stat.S_ISREG(status.st_mode) and time.time_ns() - status.st_mtime_ns < _NEW_NS:
        with contextlib.suppress(OSError):  # the file belongs to another user
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 1), follow_symlinks=False)
            status = os.lstat(path)
    return status


def _state(status: os.stat_result) -> tuple[int, int, int]:
    """Return what changes when a file is written or replaced."""
    return status.st_ino, status.st_size, status.st_mtime_ns

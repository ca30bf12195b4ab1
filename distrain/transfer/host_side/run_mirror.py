"""The directory of one run in the cache of a host, with a copy of the user's project. Runs in: agent, guard.

::

    runs/{place}/       locked by the agent
        files/          the mirror: /home/me/train.py of the user's machine is files/home/me/train.py
        checkpoints/    checkpoints that were copied here for reading, and files until all have arrived
        project         link to the project in the cache that was copied to the mirror
        .new            a file that is being copied; a rename gives it its place

A file of the mirror that has size and time of that in the project is a copy. All others, workers have written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from typing import TYPE_CHECKING

from distrain.transfer.host_side.cache_files import delete, lock_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class RunMirror:
    """The directory of a run, which this process has locked.

    files: the mirror. checkpoints: a directory, empty at first, that goes with the run.
    """

    def __init__(self, path: Path, fd: int) -> None:
        """Take over a directory with its lock."""
        self.path = path
        self.files = path / "files"
        self.checkpoints = path / "checkpoints"
        self._project = path / "project"
        self._new = path / ".new"
        self._fd = fd

    @classmethod
    def claim(cls, path: Path) -> RunMirror | None:
        """Lock a directory, which is made if necessary. Return None if another process uses it. Raise OSError."""
        path.mkdir(mode=0o700, exist_ok=True)
        fd = lock_folder(path, fcntl.LOCK_EX)
        if fd is None:
            return None
        run = cls(path, fd)
        run._clear()  # if the agent of a former run was killed
        run.files.mkdir(mode=0o700, exist_ok=True)
        run.checkpoints.mkdir(mode=0o700)
        return run

    def mirrored(self, path: str) -> str:
        """Return where the mirror has an absolute path of the user's machine."""
        return f"{self.files}{os.path.normpath('/' + path.lstrip('/'))}".rstrip("/")

    def place(self, project: Path, folders: Sequence[str]) -> None:
        """Copy a project to the mirror, in place of the one before. What workers have written stays. Raise OSError.

        folders: directories to be there, also without files.
        """
        if self._placed() != str(project):
            self._delete_copies()
            delete(self._project)
            self._project.symlink_to(project)
            self.files.mkdir(mode=0o700, exist_ok=True)
        if os.listdir(self.files):
            self._make_way(project)
        for folder in folders:
            os.makedirs(self.mirrored(folder), exist_ok=True)
        try:
            shutil.copytree(project, self.files, copy_function=self._copy, dirs_exist_ok=True)
        except shutil.Error as error:  # it has a list of all errors
            raise OSError(error.args[0][0][-1]) from error

    def _make_way(self, project: Path) -> None:
        """Delete what workers have put in place of the files and directories of a project, such as links."""
        for parent, folders, names in os.walk(project):
            here = f"{self.files}{parent[len(str(project)) :]}"
            for is_folder, entries in ((True, folders), (False, names)):
                for path in (f"{here}/{name}" for name in entries):
                    if is_folder != (os.path.isdir(path) and not os.path.islink(path)):
                        delete(path)

    def _copy(self, source: str, target: str) -> None:
        if not _is_copy(target, source):
            shutil.copy2(source, self._new)
            os.replace(self._new, target)

    def _placed(self) -> str:
        """Return the path of the project whose copy the mirror has."""
        with contextlib.suppress(OSError):
            return os.readlink(self._project)
        return ""

    def end(self) -> None:
        """Delete what the run no longer needs, and unlock it. Harmless when done twice.

        Files that workers have written or changed stay. Without any, the whole directory is deleted.
        """
        if self._fd < 0:
            return
        self._clear()
        with contextlib.suppress(OSError):
            self.path.rmdir()
        os.close(self._fd)
        self._fd = -1

    def _clear(self) -> None:
        self._delete_copies()
        for path in (self.checkpoints, self._new, self._project):
            delete(path)

    def _delete_copies(self) -> None:
        """Delete from the mirror what workers have not written, and directories that are empty then."""
        project, files = self._placed(), str(self.files)
        if self.files.is_symlink():
            self.files.unlink()
        for parent, _, names in os.walk(files, topdown=False):
            for name in names:
                path = os.path.join(parent, name)
                with contextlib.suppress(OSError):
                    if _is_copy(path, f"{project}{path[len(files) :]}"):
                        os.unlink(path)
            if os.path.basename(parent) == "__pycache__":
                delete(parent)
            with contextlib.suppress(OSError):
                os.rmdir(parent)


def end_killed_run(path: Path) -> None:
    """End a run whose agent was killed. Do nothing if it still runs, or has ended properly."""
    with contextlib.suppress(OSError):
        if os.listdir(path) != ["files"] and (fd := lock_folder(path, fcntl.LOCK_EX)) is not None:
            RunMirror(path, fd).end()


def _is_copy(path: str, original: str) -> bool:
    """Return whether a file is a copy that nobody has changed."""
    try:
        found, wanted = os.lstat(path), os.lstat(original)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and (found.st_size, found.st_mtime_ns) == (wanted.st_size, wanted.st_mtime_ns)

"""The directory of one run in the cache of a host, with a copy of the user's project. Runs in: agent, guard.

::

    runs/{place}/       locked by the agent
        {digest}/       a copy of a project of the cache: /home/me/train.py of the user's machine is home/me/train.py
        files/          what workers write into get_trial_dir()
        checkpoints/    checkpoints that were copied here for reading, and files until all have arrived
        .new            a copy of a project that is being made; a rename gives it its place
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import os
import shutil
from typing import TYPE_CHECKING

from distrain.transfer.host_side.cache_files import delete, lock_folder

if TYPE_CHECKING:
    from pathlib import Path


class RunMirror:
    """The directory of a run, which this process has locked.

    project: the copy of the user's files that workers use, once there is one. files: the directory that stands for the
    user's root directory otherwise. checkpoints: a directory, empty at first, that goes with the run.
    """

    def __init__(self, path: Path, fd: int) -> None:
        """Take over a directory with its lock."""
        self.path = path
        self.project = self.files = path / "files"
        self.checkpoints = path / "checkpoints"
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
        delete(run.checkpoints)  # if the agent of a former run was killed
        run.checkpoints.mkdir(mode=0o700)
        return run

    def place(self, project: Path) -> bool:
        """Use a copy of a project of the cache. Return False if the cache does not have it. Raise OSError.

        Workers write into the copy as into the original at home: a further attempt finds that.
        """
        copy = self.path / project.name
        if not copy.is_dir():
            if (fd := lock_folder(project, fcntl.LOCK_SH)) is None:
                return False
            delete(self._new)
            try:
                shutil.copytree(project, self._new)
            except shutil.Error as error:  # it has a list of all errors
                raise OSError(error.args[0][0][-1]) from error
            finally:
                os.close(fd)
            self._new.rename(copy)
        self.project = copy
        return True

    def end(self) -> None:
        """Delete what the run no longer needs, and unlock it. Harmless when done twice.

        What workers have written stays, with the copy of the project that it is in. Without any, the whole directory is
        deleted.
        """
        if self._fd < 0:
            return
        projects = self.path.parent.parent / "projects"
        for copy in self.path.iterdir():
            if _is_unchanged(copy, projects / copy.name):
                delete(copy)
        delete(self._new)
        for parent, _, _ in os.walk(self.files, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(parent)
        delete(self.checkpoints)  # last of all: it shows that the run has not ended
        with contextlib.suppress(OSError):
            self.path.rmdir()
        os.close(self._fd)
        self._fd = -1


def end_killed_run(path: Path) -> None:
    """End a run whose agent was killed. Do nothing if it still runs, or has ended properly."""
    with contextlib.suppress(OSError):
        if (path / "checkpoints").exists() and (fd := lock_folder(path, fcntl.LOCK_EX)) is not None:
            RunMirror(path, fd).end()


def _is_unchanged(copy: Path, project: Path) -> bool:
    """Return whether workers have written nothing into the copy of a project, or at most compiled modules."""
    try:
        seen = filecmp.dircmp(copy, project, ignore=["__pycache__"])
        if seen.left_only or seen.diff_files or seen.common_funny or seen.funny_files:
            return False
        return all(_is_unchanged(copy / name, project / name) for name in seen.common_dirs)
    except OSError:  # the project was deleted
        return False

"""The directory of one run in the cache of a host. Runs in: agent, guard.

::

    runs/{place}/       locked by the agent
        files/          what workers write into get_trial_dir()
        checkpoints/    checkpoints that were copied here for reading, and files until all have arrived
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from distrain.transfer.host_side.cache_files import delete, lock_folder

if TYPE_CHECKING:
    from pathlib import Path


class RunMirror:
    """The directory of a run, which this process has locked.

    files: the directory that stands for the user's root directory. checkpoints: a directory, empty at first, that goes
    with the run.
    """

    def __init__(self, path: Path, fd: int) -> None:
        """Take over a directory with its lock."""
        self.path = path
        self.files = path / "files"
        self.checkpoints = path / "checkpoints"
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

    def end(self) -> None:
        """Delete all but the files of workers, and unlock the directory. Harmless when done twice."""
        if self._fd < 0:
            return
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

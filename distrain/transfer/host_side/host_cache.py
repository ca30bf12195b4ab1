"""The cache of a host that does not share the user's files. Runs in: agent, guard.

::

    $DISTRAIN_CACHE, else $XDG_CACHE_HOME/distrain, else ~/.cache/distrain
        projects/{digest}/      the files of a project: /home/me/train.py of the user's machine is home/me/train.py
        runs/{place}/           the directory of a run, locked by the agent
            files/              what workers write into get_trial_dir()
            checkpoints/        checkpoints that were copied here for reading, and files until all have arrived
        environments/{key}/     virtual environments; see environments
        programs/{key}/         distrain itself, put there by the bootstrap
        .trim.lock              locked by a process that deletes what is old
        CACHEDIR.TAG            says that the directory is distrain's; backup programs leave it out

The processes that use a directory have locked it: together with others (``LOCK_SH``), or alone (``LOCK_EX``). So a kill
needs no repair. Whatever begins with ``.new-`` is incomplete. Directories are deleted as a whole, by one process at a
time, when nobody has used them for a month.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.storage.names import numbered
from distrain.system.locks import lock_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.wire.shipped_file import ShippedFile

KINDS = ("projects", "runs", "environments", "programs")
_MADE_BEFORE = ("environments", "programs")
"""Directories that may be there before the cache was used for the first time."""
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# See https://bford.info/cachedir/\n"
_FORMER_AGENT_S = 2.0
"""Seconds to wait for a former agent of the same run, which may be ending."""
_POLL_S = 0.02
_UNUSED_S = 30 * 24 * 3600.0
"""Seconds without use after which a directory is deleted."""
_CURE = "name another directory with env.DISTRAIN_CACHE=/path in the hostfile"


# -- directories -----------------------------------------------------------------------------------------------------


def lock_folder(path: Path, how: int) -> int | None:
    """Lock a directory, and note the time of its use. Return its descriptor, which keeps the lock until it is closed.

    Return None if there is no such directory, or if another process has locked it or just deleted it. Raise OSError.
    """
    fd = lock_path(path, how | fcntl.LOCK_NB)
    if fd is not None:
        with contextlib.suppress(OSError):  # it may be read-only
            os.utime(fd)
    return fd


def delete(path: str | Path) -> None:
    """Delete whatever is there, as far as possible. Follow no links."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
        return
    for parent, _, _ in os.walk(path):
        with contextlib.suppress(OSError):  # directories in it may be read-only
            os.chmod(parent, 0o700)
    shutil.rmtree(path, ignore_errors=True)


# -- the cache -------------------------------------------------------------------------------------------------------


class RunFolder:
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
    def claim(cls, path: Path) -> RunFolder | None:
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
            RunFolder(path, fd).end()


class HostCache:
    """The directory. projects, runs, environments, programs: the directories in it."""

    def __init__(self, root: Path | None = None) -> None:
        """Make the directory if necessary. root: None for the usual place.

        Raise OSError if it cannot be made, is a link or another user's, or has files that are not distrain's.
        """
        self.root = usual_root() if root is None else root
        self.projects, self.runs, self.environments, self.programs = (self.root / kind for kind in KINDS)
        try:
            with contextlib.suppress(FileExistsError):
                self.root.mkdir(mode=0o700, parents=True)
            _make_private(self.root)
            for kind in KINDS:
                (self.root / kind).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            text = f"cannot use {self.root} for the files of runs on this host ({error.strerror or error}); {_CURE}"
            raise OSError(error.errno or 0, text) from error

    def use_project(self, digest: str, files: Sequence[ShippedFile]) -> tuple[Path, bool]:
        """Return the directory for a project, and whether the project is there. Raise OSError.

        It stays as long as this process lives. Workers write into it as into the original at home. If they have changed
        a file of the project, later runs get another copy.
        """
        for folder in (self.projects / name for name in numbered(digest)):
            if (fd := lock_folder(folder, fcntl.LOCK_SH)) is None:
                return folder, False
            if all(file._replace(path=f"{folder}{file.path}").is_in_place for file in files):
                return folder, True
            os.close(fd)
        raise AssertionError("there is always another name")

    def claim_run(self, place: str) -> RunFolder:
        """Make and lock the directory of a run: ``place``, or another one if a living process uses that.

        The lock lasts as long as this process, or until RunFolder.end(). Raise OSError.
        """
        deadline = time.monotonic() + _FORMER_AGENT_S
        while (run := RunFolder.claim(self.runs / place)) is None:
            if time.monotonic() > deadline:
                return next(filter(None, (RunFolder.claim(self.runs / name) for name in numbered(place))))
            time.sleep(_POLL_S)
        return run

    def trim(self) -> None:
        """Delete what killed runs have left, and what was not used for a month. What is in use stays.

        So do files of ranks in the directories of runs: they are copied when the run next uses this host.

        Raise OSError, such as BlockingIOError if another process deletes files here, also on a file system without
        locks.
        """
        with (self.root / ".trim.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in self.runs.iterdir():
                end_killed_run(path)
            for path in self.root.glob("*/*"):
                with contextlib.suppress(OSError):  # it is gone, or cannot be renamed
                    if path.parent != self.runs and time.time() - path.lstat().st_mtime > _UNUSED_S:
                        _delete(path)


def usual_root() -> Path:
    """Return the directory that the environment names. Raise OSError if it names none."""
    named = os.environ.get("DISTRAIN_CACHE", "")
    parent = os.environ.get("XDG_CACHE_HOME", "")
    usual = os.path.join(parent if os.path.isabs(parent) else "~/.cache", "distrain")
    root = os.path.expanduser(named or usual)
    if not os.path.isabs(root):
        why = f"DISTRAIN_CACHE={named} is not an absolute path" if named else "this user has no home directory"
        raise OSError(f"no directory for the files of runs on this host: {why}; {_CURE}")
    return Path(root)


def _make_private(root: Path) -> None:
    """Let only this user use the directory, and mark it as distrain's. Raise OSError."""
    status = os.lstat(root)
    if root.is_symlink():
        raise PermissionError("it is a link, which distrain does not follow for its cache")
    if status.st_uid != os.geteuid():
        raise PermissionError(f"it belongs to another user, number {status.st_uid}")
    names = [name for name in os.listdir(root) if not name.startswith(".") and name not in _MADE_BEFORE]
    if names and not (root / _TAG).exists():  # looked at last: another process may be here for the first time, too
        raise FileExistsError(f"it has files that are not distrain's, such as {names[0]}")
    root.chmod(0o700)
    if not names:
        (root / _TAG).write_text(_TAG_TEXT)


def _delete(path: Path) -> None:
    """Delete an entry, unless a process has locked it. Raise OSError."""
    if (fd := lock_folder(path, fcntl.LOCK_EX)) is not None:
        doomed = path.with_name(f".new-old-{path.name}")  # nobody sees a part of it under its name
        try:
            delete(doomed)  # of a process that was killed here
            os.rename(path, doomed)
            delete(doomed)
        finally:
            os.close(fd)

"""A temporary directory for each host of a run, which does not outlive the run. Runs in: agent, guard, worker.

A killed process cannot delete its temporary files, such as a dict checkpoint that it is storing. So all of them are in
one directory. The agent and its guard hold a lock on it, and remove it when the host has no processes of the run left.
If both were killed, the guard of the next run on this host removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

_VARIABLE = "DISTRAIN_SCRATCH"
_PREFIX = "distrain-run-"


def scratch_directory() -> str | None:
    """Return the argument ``dir`` for tempfile: the directory of this host in a worker, else None.

    None means the usual directory. It is right outside of workers, where temporary files belong to the user, and in
    workers with a TMPDIR of their own.
    """
    path = os.environ.get(_VARIABLE, "")
    return path if os.path.dirname(path) == tempfile.gettempdir() and os.path.isdir(path) else None


def delete_with(owner: object, folder: str) -> None:
    """Delete a directory when its owner is deleted, or when this process exits."""
    weakref.finalize(owner, _delete_in, os.getpid(), folder)


def _delete_in(pid: int, folder: str) -> None:
    if os.getpid() == pid:  # a child that was forked with the owner deletes nothing
        shutil.rmtree(folder, ignore_errors=True)


def claim() -> str | None:
    """Make the directory for the processes that this one starts. Return None if no temporary directory can be made.

    This process, and those that it forks, hold the lock until they end.
    """
    try:
        path = _make()
    except OSError:
        return None
    os.environ[_VARIABLE] = path
    return path


def _make() -> str:
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX)
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY)  # it stays open, and keeps the lock
            fcntl.flock(fd, fcntl.LOCK_SH)  # waits while another process removes it as abandoned
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return path


def clear(path: str | None) -> None:
    """Empty a directory of :func:`claim`."""
    if path is not None:
        for entry in Path(path).glob("*"):  # finds nothing in a directory that was removed
            shutil.rmtree(entry, ignore_errors=True)


def remove(path: str | None) -> None:
    """Remove a directory of :func:`claim`; harmless when done twice."""
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the directories of this user that no process has locked."""
    try:
        found = list(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))
    except OSError:
        return
    for path in found:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.getuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)

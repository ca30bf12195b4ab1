"""A temporary directory for each host of a run, which does not outlive the run. Runs in: agent, guard, worker.

A process that is killed cannot delete what it has written for a moment, such as a dict checkpoint that is being stored.
So all that goes into one directory. The agent and its guard hold a lock on it, and remove it when the host is empty. If
both of them were killed, or the host was, the guard of the next run on this host removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_VARIABLE = "DISTRAIN_SCRATCH"
_PREFIX = "distrain-run-"


def scratch_directory() -> str | None:
    """Return what to give to tempfile as ``dir``: the directory of this host in a worker, None for the usual one
    elsewhere, where temporary files belong to the user, and in workers that have a TMPDIR of their own.
    """
    path = os.environ.get(_VARIABLE, "")
    return path if os.path.dirname(path) == tempfile.gettempdir() and os.path.isdir(path) else None


def claim() -> str | None:
    """Make the directory for the processes that this one starts. It is ours until this process, and all that it forks,
    have ended or called :func:`remove`. Returns None if there is no place for temporary files.
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
            fd = os.open(path, os.O_RDONLY)  # and stays open
            fcntl.flock(fd, fcntl.LOCK_SH)  # waits for a process that takes it for an abandoned one
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return path


def clear(path: str | None) -> None:
    """Empty a directory that we have claimed."""
    if path is not None:
        for entry in Path(path).glob("*"):  # which finds nothing in what somebody has removed
            shutil.rmtree(entry, ignore_errors=True)


def remove(path: str | None) -> None:
    """Remove a directory that we have claimed; harmless when done twice."""
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the directories of this user that nobody holds any more."""
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

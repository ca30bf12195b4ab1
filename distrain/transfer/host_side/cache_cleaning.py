"""The deletion of what is old or left over in the cache of a host. Runs in: agent, guard.

An entry is deleted as a whole: the directory of a project, a run, an environment or a program. It stays as long as a
process has locked it. Only one process deletes at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from distrain.transfer.host_side.cache_files import delete, lock_folder
from distrain.transfer.host_side.host_cache import HostCache, usual_root
from distrain.transfer.host_side.run_mirror import end_killed_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_INCOMPLETE = ".new-"
_INCOMPLETE_S = 3600.0
"""Seconds for which a process may be making or deleting an entry that has such a name."""


class _Entry(NamedTuple):
    """Something that is deleted as a whole. used: time of the last use. size: in bytes."""

    path: Path
    used: float
    size: int


def trim(cache: HostCache, limit_bytes: int) -> None:
    """Delete what killed runs have left, and what was not used for the longest time, down to a limit.

    What is in use stays even above the limit. Raise OSError, such as BlockingIOError if another process deletes files
    here.
    """
    with _exclusive(cache):
        _end_killed_runs(cache)
        entries = _entries(cache)
        total = sum(entry.size for entry in entries)
        for entry in sorted(entries, key=lambda entry: entry.used):
            if total > limit_bytes and _delete(entry.path):
                total -= entry.size


def clear_leftovers() -> None:
    """Delete what killed agents have left of their runs in the cache of this user, if there is one.

    Raise OSError, also if another process deletes files there.
    """
    root = usual_root()
    if root.is_dir():  # most hosts have none
        cache = HostCache(root)
        with _exclusive(cache):
            _end_killed_runs(cache)


@contextlib.contextmanager
def _exclusive(cache: HostCache) -> Iterator[None]:
    """Let no other process delete files here. Raise OSError, also on a file system without locks."""
    with (cache.root / ".trim.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _end_killed_runs(cache: HostCache) -> None:
    for path in cache.runs.iterdir():
        end_killed_run(path)


def _entries(cache: HostCache) -> list[_Entry]:
    """Return all that may be deleted: nothing that a process may be making or deleting."""
    found = []
    for path in cache.root.glob("*/*"):
        with contextlib.suppress(OSError):  # it is gone
            used = path.lstat().st_mtime
            is_incomplete = path.name.startswith(_INCOMPLETE) and time.time() - used < _INCOMPLETE_S
            if path.is_dir() and not path.is_symlink() and not is_incomplete:
                found.append(_Entry(path, used, _bytes_of(path)))
    return found


def _bytes_of(folder: Path) -> int:
    """Return the bytes on disk. A file with several names counts in part: uv links those of environments to its own."""
    total = 0
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                total += (status.st_blocks * 512 or status.st_size) // max(1, status.st_nlink)
    return total


def _delete(path: Path) -> bool:
    """Return whether an entry is gone. It stays if a process has locked it."""
    with contextlib.suppress(OSError):
        if (fd := lock_folder(path, fcntl.LOCK_EX)) is not None:
            try:
                doomed = path.with_name(f"{_INCOMPLETE}old-{path.name}")  # nobody sees a part of it under its name
                delete(doomed)  # of a process that was killed here
                os.rename(path, doomed)
                delete(doomed)
            finally:
                os.close(fd)
    return not path.exists()

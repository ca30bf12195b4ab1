"""The deletion of what is old or left over in the cache of a host. Runs in: agent, guard.

An entry is deleted as a whole: a file in ``blobs/``, or the directory of a run, an environment or a program. It stays
as long as a process has locked it. Only one process deletes at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distrain.transfer.host_side.cache_files import delete, try_lock, unlock
from distrain.transfer.host_side.environments import COMPLETE, lock_of
from distrain.transfer.host_side.host_cache import KINDS
from distrain.transfer.host_side.run_mirror import LOCK, RunMirror, delete_run, has_leftovers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from distrain.transfer.host_side.host_cache import HostCache

_INCOMPLETE = ".new-"
_MOST_ENVIRONMENTS = 5
"""Number of virtual environments that trim() keeps, also below the limit: each may have some gigabytes."""
_SOON_NEEDED_S = 3600.0
"""Age in seconds below which trim() keeps files that no process has locked: a run may be about to use them."""


def size_by_kind(cache: HostCache) -> dict[str, int]:
    """Return the bytes on disk of each kind of content."""
    sizes = Counter(dict.fromkeys(KINDS, 0))
    for entry in _entries(cache):
        sizes[entry.kind] += entry.size
    return dict(sizes)


def trim(cache: HostCache, limit_bytes: int) -> None:
    """Delete what killed processes have left, and what was not used for the longest time, down to a limit.

    What is in use, or may be soon, stays even above the limit. Do nothing if another process deletes files here.
    """
    with contextlib.suppress(OSError), _alone(cache, wait=False) as now:
        live = _live_runs(cache)
        _end_killed_runs(cache, live)
        entries = _entries(cache)
        total = sum(entry.size for entry in entries)
        spared = _spared(cache, live) | {entry.label for entry in _newest(entries, "programs")[:1]}
        surplus = _newest(entries, "environments")[_MOST_ENVIRONMENTS:]
        for entry in sorted(entries, key=lambda entry: (not entry.is_incomplete, entry.used)):
            is_needless = entry.is_incomplete or entry in surplus or total > limit_bytes
            if is_needless and entry.label not in spared and _delete(entry, _Past(now, now - _SOON_NEEDED_S)):
                total -= entry.size


def clear_leftovers(cache: HostCache) -> None:
    """Delete what killed agents have left of their runs. Do nothing if another process deletes files here."""
    with contextlib.suppress(OSError), _alone(cache, wait=False):
        _end_killed_runs(cache, _live_runs(cache))


def empty(cache: HostCache) -> tuple[int, list[str]]:
    """Delete everything that no run uses. Return the bytes that are free now, and the names of what is in use.

    While there are runs, files that they may be about to use stay, too. Raise OSError.
    """
    freed, in_use = 0, []
    with _alone(cache, wait=True) as now:
        entries, live = _entries(cache), _live_runs(cache)
        spared = _spared(cache, live)
        for entry in entries:
            may_be_needed = entry.is_incomplete or (live and entry.kind != "runs")
            past = _Past(now, now - _SOON_NEEDED_S if may_be_needed else now)
            if entry.label not in spared and _delete(entry, past):
                freed += entry.size
            elif entry.kind != "blobs" and (entry.kind == "runs" or past.includes(entry.used)):
                in_use.append(entry.label)
    return freed, sorted(in_use)


@contextlib.contextmanager
def _alone(cache: HostCache, *, wait: bool) -> Iterator[float]:
    """Let no other process delete files here. Yield the present time of this file system.

    Raise BlockingIOError if another process has the lock, unless this one waits. Raise OSError.
    """
    fd = os.open(cache.root / ".trim.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        os.utime(fd)
        yield os.fstat(fd).st_mtime  # a file server may have another clock than this machine
    finally:
        unlock(fd)


# -- runs -------------------------------------------------------------------------------------------------------------


def _live_runs(cache: HostCache) -> list[str]:
    return [entry.name for entry in _scan(cache.runs) if _is_folder(entry) and _is_locked(Path(entry.path, LOCK))]


def _is_locked(path: Path) -> bool:
    try:
        fd = try_lock(path)
    except OSError:  # on a file system without locks, nobody knows
        return True
    if fd is not None:
        unlock(fd)
    return fd is None


def _end_killed_runs(cache: HostCache, live: Collection[str]) -> None:
    """End the runs whose agents were killed."""
    for path in cache.runs.iterdir():
        with contextlib.suppress(OSError):
            if path.name not in live and has_leftovers(path) and (fd := try_lock(path / LOCK)) is not None:
                RunMirror(path, cache.blobs, fd).end()


def _spared(cache: HostCache, live: Collection[str]) -> set[str]:
    """Return the labels of live runs and of the blobs that they use."""
    records = [RunMirror.recorded_in(cache.runs / name) for name in live]
    blobs = {f"blobs/{version[0]}" for record in records for versions in record.values() for version in versions}
    return blobs.union(f"runs/{name}" for name in live)


# -- entries ----------------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """Something that is deleted as a whole.

    used: time of the last use, in seconds since 1970. size: in bytes. is_incomplete: a process is making or deleting
    it, or was killed while it did.
    """

    kind: str
    name: str
    path: str
    used: float
    size: int
    is_incomplete: bool

    @property
    def label(self) -> str:
        return f"{self.kind}/{self.name}"


def _entries(cache: HostCache) -> list[_Entry]:
    """Return all that could be deleted."""
    found = [_entry("blobs", entry) for folder in _scan(cache.blobs) for entry in _scan(folder.path)]
    for kind, witness in (("runs", LOCK), ("environments", COMPLETE), ("programs", "")):
        found += [_entry(kind, entry, witness) for entry in _scan(cache.root / kind) if _is_folder(entry)]
    return [entry for entry in found if entry is not None]


def _scan(folder: str | Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _entry(kind: str, entry: os.DirEntry[str], witness: str = "") -> _Entry | None:
    """Return what is known of an entry; None if it is gone."""
    is_incomplete = _INCOMPLETE in entry.name and kind != "runs"
    is_incomplete = is_incomplete or (witness == COMPLETE and not os.path.exists(f"{entry.path}/{witness}"))
    try:
        return _Entry(kind, entry.name, entry.path, _last_use(entry.path, witness), _bytes_of(entry), is_incomplete)
    except OSError:
        return None


def _last_use(path: str, witness: str = "") -> float:
    """Return when something was last used. witness: a file in it that is touched at each use. Raise OSError."""
    with contextlib.suppress(OSError):
        return os.lstat(f"{path}/{witness}" if witness else path).st_mtime
    return os.lstat(path).st_mtime


def _bytes_of(entry: os.DirEntry[str]) -> int:
    """Return the bytes on disk. A file with several names counts in part: uv links those of environments to its own.

    Some file systems do not know the number of blocks, at least not yet.
    """
    try:
        status = entry.stat(follow_symlinks=False)
        own = status.st_blocks * 512 or status.st_size
        names = max(1, status.st_nlink)  # none if it is being deleted
        return own + sum(map(_bytes_of, _scan(entry.path))) if _is_folder(entry) else own // names
    except OSError:  # it is gone
        return 0


def _newest(entries: Sequence[_Entry], kind: str) -> list[_Entry]:
    """Return the complete entries of a kind. The first one was used last."""
    found = [entry for entry in entries if entry.kind == kind and not entry.is_incomplete]
    return sorted(found, key=lambda entry: entry.used, reverse=True)


# -- their deletion ---------------------------------------------------------------------------------------------------


class _Past(NamedTuple):
    """The times before a cutoff, in seconds since 1970."""

    now: float
    cutoff: float

    def includes(self, used: float) -> bool:
        """Return whether a time of use is before the cutoff, or so far in the future that the clock was wrong."""
        return used <= self.cutoff or used > self.now + _SOON_NEEDED_S


def _delete(entry: _Entry, past: _Past) -> bool:
    """Return whether something is gone. It stays if a process has locked it, or has begun to use it."""
    with contextlib.suppress(OSError):
        match entry.kind:
            case "blobs":
                _delete_unless_used(entry.path, past)
            case "runs":
                _delete_run(entry.path, past)
            case "environments":
                _delete_environment(entry.path, past)
            case "programs":
                _delete_program(entry.path, past)
    return not os.path.lexists(entry.path)


def _delete_run(path: str, past: _Past) -> None:
    """Delete a run whose agent has ended, with the files that its workers have left. Raise OSError."""
    if not past.includes(_last_use(path, LOCK)):
        return
    fd = try_lock(Path(path, LOCK))
    if fd is not None:
        delete_run(Path(path))
        unlock(fd)


def _delete_environment(path: str, past: _Past) -> None:
    """Delete an environment that no process has locked. Its lock stays, as others may wait for it. Raise OSError."""
    fd = try_lock(lock_of(Path(path)))
    if fd is not None:
        try:
            if past.includes(_last_use(path, COMPLETE)):
                delete(f"{path}/{COMPLETE}")  # first, as nobody uses a part of an environment
                delete(path)
        finally:
            unlock(fd)


def _delete_program(path: str, past: _Past) -> None:
    """Delete a program that no process runs. Raise OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _delete_unless_used(path, past)
    finally:
        unlock(fd)


def _delete_unless_used(path: str, past: _Past) -> None:
    """Delete a file or a directory, unless a process has begun to use it. Raise OSError.

    A process that looks for it meanwhile either finds and touches it before the rename, or takes it for missing.
    Nobody sees a part of it under its name.
    """
    if not past.includes(_last_use(path)):
        return
    doomed = f"{path}{_INCOMPLETE}trim"
    delete(doomed)
    os.rename(path, doomed)
    if past.includes(_last_use(doomed)):
        delete(doomed)
    else:
        os.rename(doomed, path)

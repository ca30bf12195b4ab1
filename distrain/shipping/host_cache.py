"""The cache of a host that does not share the user's files: one place with a limit.

Runs in: agent, stream server.

::

    $DISTRAIN_CACHE, else $XDG_CACHE_HOME/distrain, else ~/.cache/distrain
        blobs/ab/abcdef...      files of projects by their digest, for all runs
        runs/{place}/           one directory for each run; see run_mirror
        environments/{key}/     virtual environments, with {key}.lock, which their users have locked together
        programs/{key}/         distrain itself, put there by the bootstrap; the processes that run it have locked it
        .trim.lock              locked by a process that deletes what is old
        CACHEDIR.TAG            says that the directory is distrain's; backup programs leave it out

Only locks say who uses what, so a kill needs no repair but of files. Whatever has ``.new-`` in its name is incomplete.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distrain.shipping.run_mirror import (
    LOCK,
    RunMirror,
    delete,
    delete_run,
    explaining_full_disk,
    has_leftovers,
    try_lock,
    unlock,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from distrain.shipping.shipped_file import ShippedFile

DEFAULT_LIMIT_BYTES = 20 << 30
"""Size up to which a cache may grow: some environments with a framework each, and the projects of many runs."""
_KINDS = ("blobs", "runs", "environments", "programs")
_MADE_BEFORE = ("environments", "programs")
"""Directories that may be there before the cache was used for the first time."""
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# See https://bford.info/cachedir/\n"
_INCOMPLETE = ".new-"
_COMPLETE = ".complete"
_FORMER_AGENT_S = 2.0
"""Seconds to wait for a former agent of the same run, which may be ending."""
_POLL_S = 0.02
_SOON_NEEDED_S = 3600.0
"""Age in seconds below which trim() keeps files that no process has locked: a run may be about to use them."""
_CURE = "name another directory with env.DISTRAIN_CACHE=/path in the hostfile"


class _Entry(NamedTuple):
    """Something that is deleted as a whole. used: when it was last used, in seconds since 1970. size: in bytes."""

    kind: str
    name: str
    path: str
    used: float
    size: int

    @property
    def label(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def is_incomplete(self) -> bool:
        """True if a process was killed that made or deleted it, provided that it is also old."""
        if self.kind == "environments" and not os.path.exists(f"{self.path}/{_COMPLETE}"):
            return True
        return _INCOMPLETE in self.name and self.kind != "runs"


class _Past(NamedTuple):
    """The times before a cutoff, in seconds since 1970."""

    now: float
    cutoff: float

    def includes(self, used: float) -> bool:
        """Return whether a time of use is before the cutoff. One that is still to come says nothing."""
        return used <= self.cutoff or used > self.now + _SOON_NEEDED_S


class HostCache:
    """The directory. blobs, environments, runs, programs: the directories in it.

    A run first calls claim_run(), so that others see that it is there, then missing(), and RunMirror.place() when the
    missing files are there.
    """

    def __init__(self, root: Path | None = None) -> None:
        """Make the directory if necessary. root: None for the usual place.

        Raise PermissionError if it is a link or another user's, FileExistsError if it has files that are not
        distrain's, and OSError if it cannot be made.
        """
        self.root = _usual_root() if root is None else root
        self.blobs, self.runs, self.environments, self.programs = (self.root / kind for kind in _KINDS)
        try:
            with contextlib.suppress(FileExistsError):
                self.root.mkdir(mode=0o700, parents=True)
            _make_private(self.root)
            for kind in _KINDS:
                (self.root / kind).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            if _CURE in str(error):
                raise
            text = f"cannot use {self.root} for the files of runs on this host ({error.strerror or error}); {_CURE}"
            raise OSError(error.errno or 0, text) from error

    # -- what a run needs --

    @staticmethod
    def is_in_place(files: Sequence[ShippedFile]) -> bool:
        """Return whether this host has every file at its own path, with the same size and time of the last change.

        Then it shares them with the user's machine, or has the same copies. Without any file, nobody knows.
        """
        try:
            for file in files:
                status = os.stat(file.path)
                if status.st_size != file.size or status.st_mtime_ns != file.mtime_ns:
                    return False
        except OSError:
            return False
        return bool(files)

    def missing(self, files: Sequence[ShippedFile]) -> list[str]:
        """Return the digests of the files that have to be brought to this host, each once. Raise OSError.

        The other ones are kept for at least an hour.
        """
        sizes = {file.digest: file.size for file in files}
        return [digest for digest, size in sizes.items() if not self._has_blob(digest, size)]

    def _has_blob(self, digest: str, size: int) -> bool:
        path = self.blob(digest)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_size == size:
                os.utime(path)
                return True
            os.unlink(path)
        return False

    def blob(self, digest: str) -> Path:
        """Return where the file with a digest is, or has to be put."""
        return self.blobs / digest[:2] / digest

    def claim_run(self, place: str) -> RunMirror:
        """Make and lock the directory of a run: ``place``, or another one if a living process uses that.

        The lock lasts as long as this process and those that it forks, or until RunMirror.end(). Raise OSError, and
        ValueError if ``place`` is no file name.
        """
        if place.startswith(".") or not place or "/" in place:
            raise ValueError(f"the directory of a run must have a plain name, got {place!r}")
        deadline = time.monotonic() + _FORMER_AGENT_S
        with explaining_full_disk(self.root):
            while (run := RunMirror.claim(self.runs / place, self.blobs)) is None:
                if time.monotonic() > deadline:
                    others = (self.runs / f"{place}-{number}" for number in itertools.count(2))
                    return next(filter(None, (RunMirror.claim(path, self.blobs) for path in others)))
                time.sleep(_POLL_S)
        return run

    # -- what is deleted --

    def size(self) -> dict[str, int]:
        """Return the bytes on disk of each kind of content."""
        sizes = Counter(dict.fromkeys(_KINDS, 0))
        for entry in self._entries():
            sizes[entry.kind] += entry.size
        return dict(sizes)

    def trim(self, limit_bytes: int) -> None:
        """Delete what killed processes have left, and what was not used for the longest time, down to a limit.

        What is in use, or may be soon, stays even above the limit. Do nothing if another process trims.
        """
        with contextlib.suppress(OSError), self._alone(wait=False) as now:
            live = self._live_runs()
            self._clear_leftovers(live)
            entries = self._entries()
            total = sum(entry.size for entry in entries)
            spared = self._spared(live) | _newest_program(entries)
            for entry in sorted(entries, key=lambda entry: (not entry.is_incomplete, entry.used)):
                is_wanted = entry.is_incomplete or total > limit_bytes
                if is_wanted and entry.label not in spared and self._delete(entry, _Past(now, now - _SOON_NEEDED_S)):
                    total -= entry.size

    def clear_leftovers(self) -> None:
        """Delete what killed processes have left. Do nothing if another process deletes files here."""
        with contextlib.suppress(OSError), self._alone(wait=False):
            self._clear_leftovers(self._live_runs())

    def empty(self) -> tuple[int, list[str]]:
        """Delete everything that no run uses. Return the bytes that are free now, and the names of what is in use.

        While there are runs, files that they may be about to use stay, too. Raise OSError.
        """
        freed, in_use = 0, []
        with self._alone(wait=True) as now:
            entries, live = self._entries(), self._live_runs()
            spared = self._spared(live)
            for entry in entries:
                past = _Past(now, now - _SOON_NEEDED_S if live or entry.is_incomplete else now)
                if entry.label not in spared and self._delete(entry, past):
                    freed += entry.size
                elif entry.kind != "blobs" and (entry.kind == "runs" or past.includes(entry.used)):
                    in_use.append(entry.label)
        return freed, sorted(in_use)

    @contextlib.contextmanager
    def _alone(self, *, wait: bool) -> Iterator[float]:
        """Let no other process delete files here. Yield the present time of this file system.

        Raise BlockingIOError if another process has the lock, unless this one waits. Raise OSError.
        """
        fd = os.open(self.root / ".trim.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            os.utime(fd)
            yield os.fstat(fd).st_mtime  # a file server may have another clock than this machine
        finally:
            unlock(fd)

    def _live_runs(self) -> list[str]:
        return [entry.name for entry in _scan(self.runs) if _is_folder(entry) and _is_locked(Path(entry.path, LOCK))]

    def _clear_leftovers(self, live: Collection[str]) -> None:
        """End the runs whose agents were killed."""
        for path in self.runs.iterdir():
            with contextlib.suppress(OSError):
                if path.name not in live and has_leftovers(path) and (fd := try_lock(path / LOCK)) is not None:
                    RunMirror(path, self.blobs, fd).end()

    def _spared(self, live: Collection[str]) -> set[str]:
        """Return the labels of live runs and of the blobs that they use."""
        runs = [self.runs / name for name in live]
        versions = [versions for path in runs for versions in RunMirror.recorded_in(path).values()]
        return {
            *(f"runs/{name}" for name in live),
            *(f"blobs/{version[0]}" for each in versions for version in each),
        }

    def _entries(self) -> list[_Entry]:
        """Return all that could be deleted."""
        found = [_entry("blobs", entry) for folder in _scan(self.blobs) for entry in _scan(folder.path)]
        for kind, witness in (("runs", LOCK), ("environments", _COMPLETE), ("programs", "")):
            found += [_entry(kind, entry, witness) for entry in _scan(self.root / kind) if _is_folder(entry)]
        return [entry for entry in found if entry is not None]

    def _delete(self, entry: _Entry, past: _Past) -> bool:
        """Return whether something is gone. It stays if a process has locked it, or has begun to use it."""
        with contextlib.suppress(OSError):
            if entry.kind == "runs":
                self._delete_run(entry)
            elif entry.kind == "environments":
                self._delete_environment(entry, past)
            elif entry.kind == "programs":
                _delete_program(entry.path, past)
            else:
                _delete_unless_used(entry.path, past)
        return not os.path.lexists(entry.path)

    def _delete_run(self, entry: _Entry) -> None:
        fd = try_lock(Path(entry.path, LOCK))
        if fd is not None:
            delete_run(Path(entry.path))
            unlock(fd)

    def _delete_environment(self, entry: _Entry, past: _Past) -> None:
        """Delete an environment that no process has locked. Its lock stays, as others may wait for it."""
        fd = try_lock(self.environments / f"{entry.name}.lock")
        if fd is not None:
            try:
                if past.includes(_last_use(entry.path, _COMPLETE)):
                    delete(os.path.join(entry.path, _COMPLETE))  # first, as nobody uses a part of an environment
                    delete(entry.path)
            finally:
                unlock(fd)


def existing_cache() -> HostCache | None:
    """Return the cache of this user on this host, or None if there is none. Raise OSError if it cannot be used."""
    root = _usual_root()
    return HostCache(root) if root.is_dir() else None


def _usual_root() -> Path:
    """Return the directory that the environment names. Raise OSError if it names none."""
    named = os.environ.get("DISTRAIN_CACHE", "")
    parent = os.environ.get("XDG_CACHE_HOME", "")
    usual = os.path.join(parent if os.path.isabs(parent) else "~/.cache", "distrain")
    root = os.path.expanduser(named or usual)
    if not os.path.isabs(root):
        why = f"DISTRAIN_CACHE={named} is no absolute path" if named else "this user has no home directory"
        raise OSError(f"no directory for the files of runs on this host: {why}; {_CURE}")
    return Path(root)


def _make_private(root: Path) -> None:
    """Let only this user use the directory, and mark it as distrain's. Raise OSError."""
    status = os.lstat(root)
    if root.is_symlink():
        raise PermissionError(f"{root} is a link, which distrain does not follow for its cache; {_CURE}")
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{root} belongs to another user (number {status.st_uid}); {_CURE}")
    names = [name for name in os.listdir(root) if not name.startswith(".") and name not in _MADE_BEFORE]
    if names and not (root / _TAG).exists():  # looked at last: another process may be here for the first time, too
        raise FileExistsError(f"{root} has files that are not distrain's, such as {names[0]}; {_CURE}")
    if status.st_mode & 0o777 != 0o700:
        root.chmod(0o700)
    if not names:
        (root / _TAG).write_text(_TAG_TEXT)


def _scan(folder: str | Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _entry(kind: str, entry: os.DirEntry[str], witness: str = "") -> _Entry | None:
    """Return what is known of an entry; None if it is gone."""
    try:
        return _Entry(kind, entry.name, entry.path, _last_use(entry.path, witness), _bytes_of(entry))
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
        return own + sum(map(_bytes_of, _scan(entry.path))) if _is_folder(entry) else own // status.st_nlink
    except OSError:  # it is gone
        return 0


def _newest_program(entries: Sequence[_Entry]) -> set[str]:
    """Return the label of the program that was used last, if there is one."""
    programs = [entry for entry in entries if entry.kind == "programs" and not entry.is_incomplete]
    return {max(programs, key=lambda entry: entry.used).label} if programs else set()


def _is_locked(path: Path) -> bool:
    try:
        fd = try_lock(path)
    except OSError:  # on a file system without locks, nobody knows
        return True
    if fd is not None:
        unlock(fd)
    return fd is None


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

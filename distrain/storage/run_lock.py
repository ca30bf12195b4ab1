"""The locks of run directories: an flock of a local one, a heartbeat of a remote one. Runs in: coordinator, uploader.

The heartbeats are objects: ``.lock/000001``, ``.lock/000002``, ... Each coordinator creates the next number, which
only one of two can do, and then replaces its object every few seconds. The highest number owns the run. A coordinator
that finds a higher number than its own has lost the run. An owner is alive if its object changes while another process
looks: clocks are not compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from distrain.errors import StorageError
from distrain.hosts.network import machine_id
from distrain.storage.names import LOCK
from distrain.storage.ownership import open_without_links
from distrain.system import process
from distrain.system.locks import is_locked, lock_alone
from distrain.system.log import warn
from distrain.system.remote_path import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BEAT_S = 5.0
"""Seconds between two heartbeats."""
HEARTBEAT_TIMEOUT_S = 20.0
"""Seconds to wait for a heartbeat of the owner before it counts as dead."""
_LONG_AGO_S = 600.0
"""Age in seconds of the last heartbeat at which a reader takes the owner for dead.

It is longer than clocks differ, and than a passing failure of the storage lasts.
"""
_POLL_S = 0.5
_NEWCOMER = "another process, which has just begun"


# -- local run directories --------------------------------------------------------------------------------------------

_READER_S = 0.5
"""Seconds to wait for a reader, which holds the lock for microseconds, before the directory counts as in use."""
_locks: set[LocalLock] = set()


class LocalLock:
    """A locked file. A forked child closes it, because the lock lasts until every process has closed the file.

    A child that C code has forked, and that executes no program, keeps it open. POSIX locks are not inherited, but they
    end as soon as this process closes any descriptor of the file, and two runs of one process could both have one.
    """

    def __init__(self, path: Path, run: object) -> None:
        """Lock the file at ``path``. Raise StorageError if another process uses ``run``, OSError for other failures."""
        self.fd = open_without_links(path, os.O_RDWR | os.O_CREAT)
        _locks.add(self)
        try:
            if lock_alone(self.fd, time.monotonic() + _READER_S):
                os.ftruncate(self.fd, 0)
                os.write(self.fd, f"{os.getpid()}\n".encode())
        except BlockingIOError:
            holder = os.read(self.fd, 64).decode(errors="replace").strip()
            self.release()
            raise StorageError(
                f"another run (process {holder or 'unknown'}) is using {run}; "
                "wait for it, or give this run another name (RunConfig.name)"
            ) from None
        except OSError:  # a full disk
            self.release()
            raise

    def release(self) -> None:
        """Close the file. Only once, because the number of the descriptor may be used again."""
        if self in _locks:
            _locks.remove(self)
            os.close(self.fd)


def _release_all() -> None:
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_all)


# -- remote run directories -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """A process that owns a run, or did: its identity, by which others on its machine can see whether it is alive.

    beat: the time of its last heartbeat, in seconds since 1970. released: it needs the run no more.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    host: str = field(default_factory=platform.node)
    machine: str = field(default_factory=lambda: _machine())
    pid: int = field(default_factory=os.getpid)
    started: float = field(default_factory=lambda: process.began_at(os.getpid()) or 0.0)
    beat: float = 0.0
    released: bool = False

    @classmethod
    def of(cls, lock: RemotePath, text: bytes) -> _Owner:
        """Return the owner in the lock with this text. Raise StorageError if it is damaged."""
        try:
            found = json.loads(text)
            owner = cls(**{one.name: found[one.name] for one in fields(cls)})
            float(owner.beat), int(owner.pid), float(owner.started)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise StorageError(
                f"the lock {lock} is damaged ({type(error).__name__}: {error}); if no process uses this run, delete it"
            ) from error
        return owner

    def is_dead(self) -> bool:
        """Return True if the process is known to be dead, False if it is alive or on another machine."""
        if not self.machine or self.machine != _machine():
            return False
        return process.began_at(self.pid) != self.started


def _machine() -> str:
    """Return what processes have in common that see each other's pids and times; "" if it is unknown."""
    return machine_id("pid", "time") if process.sees_pids() else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLock:
    """The lock of a remote run directory, held by this coordinator. path: its object.

    is_contested: the last owner was only silent. It may wake up, and write some files before it notices that it has
    lost the run.
    """

    run: RemotePath
    path: RemotePath
    owner: _Owner
    is_contested: bool = False

    @classmethod
    def take(cls, run: RemotePath) -> RemoteLock:
        """Take the lock. Raise StorageError if another process uses the run, OSError if the storage fails."""
        former = _objects(run)
        is_contested = bool(former) and not _wait_until_free(run, former[-1])
        number = int(former[-1].name) + 1 if former else 1
        lock = cls(run=run, path=run / LOCK / f"{number:06d}", owner=_Owner(), is_contested=is_contested)
        try:
            lock._create()
        except FileExistsError:
            raise StorageError(_in_use(run, _NEWCOMER)) from None
        if any(int(one.name) > number for one in _objects(run)):  # somebody took and left it meanwhile
            raise StorageError(_in_use(run, _NEWCOMER))
        for one in former:
            with contextlib.suppress(OSError):
                one.remove()
        return lock

    def _create(self) -> None:
        """Create the object. Raise FileExistsError if another process has done so."""
        text = self._text(time.time())
        try:
            self.path.create(text)
        except FileExistsError:
            if self.path.read_bytes() != text:  # else the answer to the first try was lost
                raise

    def _text(self, beat: float, *, released: bool = False) -> bytes:
        return json.dumps(asdict(replace(self.owner, beat=beat, released=released))).encode()

    def as_text(self) -> str:
        """Return the lock for another process, which calls :meth:`from_text`."""
        return json.dumps({"name": self.path.name, "owner": asdict(self.owner)})

    @classmethod
    def from_text(cls, run: RemotePath, text: str) -> RemoteLock:
        found: dict[str, Any] = json.loads(text)
        return cls(run=run, path=run / LOCK / found["name"], owner=_Owner(**found["owner"]))

    def check(self) -> None:
        """Raise StorageError if another process owns the run now, OSError if the storage fails."""
        present = _objects(self.run)
        if not present:
            raise StorageError(f"{self.run} or its .lock was deleted during the run; nothing more is written to it")
        if int(present[-1].name) > int(self.path.name):
            raise StorageError(
                f"another process has taken over the run {self.run}, as this one sent no heartbeat for "
                f"{HEARTBEAT_TIMEOUT_S:g} s; this one writes nothing more"
            )

    def beat(self) -> None:
        """Write a heartbeat. Raise the same errors as :meth:`check`."""
        self.check()
        self.path.write_bytes(self._text(time.time()))

    def release(self) -> None:
        """Release the run. Raise the same errors as :meth:`check`."""
        self.check()
        self.path.write_bytes(self._text(0, released=True))


class Heartbeats:
    """A thread that sends the heartbeats of a lock: the coordinator's while the run is opened, later the uploader's.

    beat: sends one. It raises StorageError if there must be no more, and OSError to try again.
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distrain-heartbeats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more heartbeats. One may be on its way."""
        self._stopped.set()

    def end(self) -> None:
        """Stop, and wait until none is on its way."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            try:
                self._beat()
            except StorageError:  # another coordinator has the run now; the uploader finds out, too
                return
            except OSError:
                continue


def _objects(run: RemotePath) -> list[RemotePath]:
    """Return the heartbeats of a run, that of the owner last."""
    folder = run / LOCK
    return [folder / name for name in sorted(filter(str.isdigit, folder.names()), key=int)]


def _wait_until_free(run: RemotePath, lock: RemotePath) -> bool:
    """Return True if the owner has released the lock or is dead, False if it is silent for long.

    Raise StorageError if it is alive.
    """
    try:
        first = last = lock.read_bytes()
    except FileNotFoundError:  # replaced after it was listed
        raise StorageError(_in_use(run, _NEWCOMER)) from None
    owner = _Owner.of(lock, first)
    if owner.released or owner.is_dead():
        return True
    who = f"process {owner.pid} on {owner.host}"
    warn(f"{run} was used by {who}; waiting up to {HEARTBEAT_TIMEOUT_S:g} s to see if it is still alive")
    for _ in range(round(HEARTBEAT_TIMEOUT_S / _POLL_S)):  # no deadline: the whole machine may stand still for a while
        time.sleep(_POLL_S)
        with contextlib.suppress(FileNotFoundError):
            last = lock.read_bytes()
        if _Owner.of(lock, last).released:
            return True
        if last != first:
            raise StorageError(_in_use(run, who))
    return False


def _in_use(run: RemotePath, who: str) -> str:
    return f"{run} is in use by {who}; wait for it, or give this run another name (RunConfig.name)"


# -- both -------------------------------------------------------------------------------------------------------------


def is_in_use(run: Path | RemotePath) -> bool:
    """Return False if no process holds the lock of a run, True if one does or if that is unknown.

    An owner of a remote run on another machine counts as dead long after its last heartbeat. A run without a lock has
    no owner: an owner that misses its lock stops writing. Raise OSError if remote storage cannot be read, StorageError
    if its lock is damaged.
    """
    if not isinstance(run, RemotePath):
        return is_locked(run / LOCK)
    present = _objects(run)
    if not present:
        return False
    lock = present[-1]
    try:
        owner = _Owner.of(lock, lock.read_bytes())
    except FileNotFoundError:  # another process takes the lock just now
        return True
    is_recent = abs(time.time() - owner.beat) < _LONG_AGO_S  # a time in the future comes from a wrong clock
    return is_recent and not owner.released and not owner.is_dead()

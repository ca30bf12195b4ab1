"""Who owns a run directory elsewhere: a heartbeat object. Runs in: coordinator, uploader.

``.lock/000001``, ``.lock/000002``, ...: each coordinator creates the next number, which only one of two can do, and
then writes its object anew every few seconds. The highest number owns the run; whoever finds a higher one than its own
has lost it. Whether an owner lives is told by its object changing while somebody watches: clocks are not compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.errors import StorageError
from distrain.system import process
from distrain.system.log import warn
from distrain.system.remote_path import RemotePath

if TYPE_CHECKING:
    from collections.abc import Mapping

BEAT_S = 5.0
SILENCE_S = 20.0
"""An owner that shows no beat for so long is dead."""
_LONG_AGO_S = 600.0
"""Since the last beat: longer than clocks differ, and than a passing trouble of the storage takes."""
_LOOK_AGAIN_S = 0.5
_SAME_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """A process, so that others on its machine can see whether it lives."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    host: str = field(default_factory=platform.node)
    machine: str = field(default_factory=lambda: _machine())
    pid: int = field(default_factory=os.getpid)
    started: float = field(default_factory=lambda: process.began_at(os.getpid()) or 0.0)

    def is_dead(self) -> bool:
        """Whether it is known to be: False where that cannot be seen from here."""
        if not self.machine or self.machine != _machine():
            return False
        began = process.began_at(self.pid)
        return began is None or abs(began - self.started) > _SAME_S


def _machine() -> str:
    """What two processes have in common that know the same pids; empty if that cannot be said."""
    with contextlib.suppress(OSError):
        if not process.sees_pids():
            return ""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLock:
    """The lock of a run directory, held. Not for one whose storage is of this process only."""

    run: RemotePath
    number: int
    owner: _Owner

    @classmethod
    def take(cls, run: RemotePath) -> RunLock:
        """Raises StorageError if the run is somebody else's, OSError if that cannot be found out."""
        folder = run / ".lock"
        numbers = _numbers(folder)
        if numbers:
            _wait_until_free(run, folder / f"{numbers[-1]:06d}")
        lock = cls(run=run, number=max(numbers, default=0) + 1, owner=_Owner())
        try:
            lock._place.create(lock._text(0))
        except FileExistsError:
            raise StorageError(_in_use(run, "another process, which has just begun")) from None
        for number in numbers:
            with contextlib.suppress(OSError):
                (folder / f"{number:06d}").remove()
        return lock

    @property
    def _place(self) -> RemotePath:
        return self.run / ".lock" / f"{self.number:06d}"

    def _text(self, beat: float, *, released: bool = False) -> bytes:
        return json.dumps({**asdict(self.owner), "beat": beat, "released": released}).encode()

    def as_text(self) -> str:
        """For the process that beats; see :meth:`from_text`."""
        return json.dumps({"number": self.number, "owner": asdict(self.owner)})

    @classmethod
    def from_text(cls, run: RemotePath, text: str) -> RunLock:
        fields: dict[str, Any] = json.loads(text)
        return cls(run=run, number=fields["number"], owner=_Owner(**fields["owner"]))

    def check(self) -> None:
        """Raises StorageError if somebody else has the run now, OSError if that cannot be found out."""
        numbers = _numbers(self.run / ".lock")
        if not numbers:
            raise StorageError(
                f"{self.run} is not there any more: somebody has deleted it, or its .lock; nothing is written any more"
            )
        if numbers[-1] > self.number:
            raise StorageError(
                f"another process has taken over the run {self.run}, as this one showed no sign of life for "
                f"{SILENCE_S:g} s; nothing more is written by this one"
            )

    def beat(self) -> None:
        """Show that the owner is alive. Raises as :meth:`check`."""
        self.check()
        self._place.write(self._text(time.time()))

    def release(self) -> None:
        """Give the run free. Raises as :meth:`check`."""
        self.check()
        self._place.write(self._text(0, released=True))


def is_in_use(run: Path | RemotePath) -> bool:
    """Return False if no process holds the lock of this run. True if one does, or if that cannot be found out.

    Raises OSError if storage elsewhere cannot be read, StorageError if its lock is damaged.
    """
    if isinstance(run, RemotePath):
        return _is_held_elsewhere(run / ".lock")
    try:
        fd = os.open(run / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _is_held_elsewhere(folder: RemotePath) -> bool:
    """An owner that cannot be seen counts as dead when its last beat is long ago, also by a clock that is wrong."""
    numbers = _numbers(folder)
    if not numbers:
        return True
    lock = folder / f"{numbers[-1]:06d}"
    try:
        said = _understood(lock, lock.read())
    except FileNotFoundError:  # another process takes it just now
        return True
    is_silent = 0 < said["beat"] < time.time() - _LONG_AGO_S
    return not (said["released"] or _owner_of(said).is_dead() or is_silent)


def _understood(lock: RemotePath, text: bytes) -> dict[str, Any]:
    """Return what the lock with this text says. Raises StorageError if it is damaged."""
    try:
        said: dict[str, Any] = json.loads(text)
        _owner_of(said), bool(said["released"]), float(said["beat"]), int(said["pid"]), float(said["started"])
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"the lock {lock} is damaged ({type(error).__name__}: {error}); if no process uses this run, delete it"
        ) from error
    return said


def _owner_of(said: Mapping[str, Any]) -> _Owner:
    return _Owner(**{name: said[name] for name in ("id", "host", "machine", "pid", "started")})


def _numbers(folder: RemotePath) -> list[int]:
    return sorted(int(name) for name in folder.names() if name.isdigit())


def _wait_until_free(run: RemotePath, lock: RemotePath) -> None:
    """Returns when its owner has released it or is dead. Raises StorageError if it lives."""
    first = last = lock.read()
    said = _understood(lock, first)
    owner = _owner_of(said)
    if said["released"] or owner.is_dead():
        return
    who = f"process {owner.pid} on {owner.host}"
    warn(f"{run} was used by {who}; looking for {SILENCE_S:g} s whether it is still alive")
    deadline = time.monotonic() + SILENCE_S
    while time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)
        with contextlib.suppress(FileNotFoundError):
            last = lock.read()
        if _understood(lock, last)["released"]:
            return
        if last != first:
            raise StorageError(_in_use(run, who))


def _in_use(run: RemotePath, who: str) -> str:
    return f"{run} is in use by {who}; wait for it, or give this run another name (RunConfig.name, --name)"

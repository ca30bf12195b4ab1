"""The tickets of a queue: one file for each job, in a directory that all of its users can write to.

A waiter changes its own ticket only, and a lock makes sure that one waiter decides at a time. Each touches its file
every few seconds; all times are those of the file system, so that the clocks of machines need not agree.

Runs in: waiter, side, commands.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import platform
import re
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from distrain.errors import StorageError
from distrain.storage.files import write_atomically
from distrain.system.locks import lock

SILENCE_S = 12.0
"""Seconds after which the ticket of a silent waiter counts for nothing."""
DAY_S = 86400.0
LOGIN = "DISTRAIN_LOGIN"
"""Environment variable of a job that was sent to another host: the name of that host for ssh."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_MOST_BYTES = 1 << 20
_LOCK = ".lock"
_CANCEL = ".cancel"
"""The end of the name of a file that says that a job is to end."""


@dataclass(kw_only=True)
class Ticket:
    """A job in a queue.

    kind: of what it needs: GPUs, or slots of CPUs. workers: how many. each: GPUs of one worker.
    hosts: those that it may use, each with its most workers (None: any number).
    expected_s: how long it takes, as its user says; None if unknown. after: jobs that have to end before.
    command: its script, with its arguments. host: the machine of its waiter; login: its name for ssh, if that differs.
    state: ``waiting``, ``running`` or ``ended``. how: it has ended. why: it still waits. begins: when that will end, if
        that is known.
    units: what it has: names of GPUs or slots, by host. reserved: what is kept for it while it waits, likewise.
    looks: by host: what this waiter has seen there (:meth:`~distrain.jobs.side.Side.look`), and when (``at``).
    run: its run directory. token: tells it from others of the same name.
    silent_s: seconds since the last sign of life.
    """

    name: str
    user: str = field(default_factory=getpass.getuser)
    kind: Literal["gpu", "slot"] = "slot"
    workers: int = 1
    each: int = 1
    hosts: dict[str, int | None] = field(default_factory=dict)
    expected_s: float | None = None
    after: list[str] = field(default_factory=list)
    command: str = ""
    host: str = field(default_factory=platform.node)
    login: str = field(default_factory=lambda: os.environ.get(LOGIN, ""))
    python: str = sys.executable
    state: Literal["waiting", "running", "ended"] = "waiting"
    how: str = ""
    why: str = ""
    submitted: float = 0.0
    begins: float | None = None
    began: float = 0.0
    ended: float = 0.0
    units: dict[str, list[str]] = field(default_factory=dict)
    reserved: dict[str, list[str]] = field(default_factory=dict)
    looks: dict[str, dict[str, Any]] = field(default_factory=dict)
    run: str = ""
    token: str = ""
    silent_s: float = 0.0

    @property
    def is_active(self) -> bool:
        """True if it waits or runs, and its process lives."""
        return self.state != "ended" and self.silent_s <= SILENCE_S

    @property
    def label(self) -> str:
        """The text by which its claims tell whose they are."""
        return f"job {self.name} of {self.user}"

    @property
    def size(self) -> int:
        """The number of GPUs or slots that it needs."""
        return self.workers * self.each

    @classmethod
    def of(cls, found: dict[str, Any]) -> Ticket:
        """Return the ticket with these fields; those of other versions are left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in known})


class Desk:
    """The directory of a queue on this machine. Its methods take and return what JSON can express."""

    def __init__(self, folder: str | Path) -> None:
        """Open a queue, and make the directory if there is none. Raise StorageError if that is not possible."""
        self.folder = Path(folder).expanduser()
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True)
                self.folder.chmod(0o1777)  # as /tmp: everybody may add a ticket, and delete only their own
            path = self.folder / _LOCK
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
                path.chmod(0o666)
            self._lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"the queue {self.folder} cannot be used: {error.strerror or error}") from None

    def lock(self) -> bool:
        """Lock the queue, unless another process has locked it. Return whether that has worked."""
        try:
            lock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Release the lock."""
        lock(self._lock, fcntl.LOCK_UN)

    def now(self) -> float:
        """Return the time by the clock of the file system, in seconds since 1970."""
        os.utime(self._lock)
        return os.fstat(self._lock).st_mtime

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the fields of all tickets by name, with ``silent_s``."""
        now, found = self.now(), {}
        for name in sorted(os.listdir(self.folder)):
            if not _NAME.fullmatch(name) or name.endswith((".new", _CANCEL)):
                continue
            with contextlib.suppress(OSError, ValueError, TypeError):  # it is just being deleted, or is something else
                # Others may have put anything here: never wait for a pipe, or follow a link.
                fd = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                with open(fd, "rb") as file:
                    silent_s = now - os.fstat(fd).st_mtime
                    found[name] = {**json.loads(file.read(_MOST_BYTES)), "name": name, "silent_s": silent_s}
        return found

    def write(self, ticket: dict[str, Any]) -> None:
        """Write a ticket. Raise StorageError if it is another user's."""
        path = self.folder / ticket["name"]
        try:
            write_atomically(path, json.dumps(ticket).encode(), sync=False)
            path.chmod(0o644)
        except OSError as error:
            raise StorageError(f"the ticket {path} cannot be written: {error.strerror or error}") from None

    def touch(self, name: str) -> bool:
        """Give a sign of life. Return True if the job was cancelled."""
        path, cancel = self.folder / name, self.folder / f"{name}{_CANCEL}"
        with contextlib.suppress(OSError):
            os.utime(path)
            return os.lstat(cancel).st_uid in (0, os.lstat(path).st_uid)
        return False

    def cancel(self, name: str) -> None:
        """Ask a job to end. Raise StorageError if it is another user's."""
        if os.geteuid() not in (0, (owner := os.lstat(self.folder / name).st_uid)):
            raise StorageError(f"{name} is a job of another user (uid {owner})")
        (self.folder / f"{name}{_CANCEL}").touch()

    def delete(self, name: str) -> None:
        """Delete a ticket, and the order to cancel its job. Raise StorageError if it is another user's."""
        try:
            for one in (name, f"{name}{_CANCEL}"):
                (self.folder / one).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"the ticket {name} cannot be deleted: {error.strerror or error}") from None

"""Evidence that a thread stands still: it waits for something that does not come. Runs in: worker.

A thread that stays in the same line may still be busy. It counts as moving if it computes, if other threads or child
processes do, or if it reads, writes, or receives data. What this cannot see, it takes for a standstill only if the
thread uses no CPU time.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from dis import opname
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distrain.worker import flight_recorder
from distrain.worker.places import call_in, is_in_collective, is_users, is_waiting, outwards, place_of

if TYPE_CHECKING:
    from types import CodeType, FrameType

LOOK_S = 1.0
"""Seconds between two looks at a thread that stays where it is."""
STANDING_S = 3.0
"""Seconds after which a standstill counts as one."""
_IDLE_SHARE = 0.05
"""A thread that waits in a loop, polling, uses less of a CPU than this; so do helpers that help with nothing."""
_BUSY_SHARE = 0.3
_MOVING_BYTES = 2048
"""Bytes per look over TCP that are more than heartbeats."""
_DISK_BYTES = 1 << 20
"""Bytes per look that a disk writes when a thread waits for it, and not only for what others log."""
_LARGEST_STACKS = 64 << 10
"""Bytes per look that a thread may write without any progress: its own stacks."""
_FEW_FAULTS = 50
"""Page faults per look of a thread that does not work through any memory."""
_SPINS = re.compile(r"JUMP|^(LOAD|STORE|COMPARE|CONTAINS|IS_OP|UNARY_NOT|TO_BOOL|NOP|RESUME)")
"""Instructions of a loop that only looks at variables."""
_TCP_BYTES_AT = slice(120, 128), slice(128, 136)
"""The offsets of tcpi_bytes_acked and tcpi_bytes_received in ``struct tcp_info`` (linux/tcp.h)."""
_SECTOR = 512
_TICKS = os.sysconf("SC_CLK_TCK")
_CONTAINERS = (list, dict, set, deque, str, bytes, bytearray)


class Standstill:
    """The standstill of one thread of this process, if it is in one.

    state: empty while it moves, and on systems that do not count what a thread does (other than Linux). ``waits``: for
    other ranks. ``blocked``: it also uses no CPU time, and nothing arrives. ``stuck``: it waits for something else.
    ``loops``: it computes the same again and again.
    since: when it came where it is (time.monotonic).
    """

    def __init__(self, native_id: int) -> None:
        self._task = Path("/proc/self/task", str(native_id))
        self._can_look = True
        self.state = ""
        self.place = ""
        self._begin(None, time.monotonic())

    def _begin(self, stand: _Stand | None, now: float) -> None:
        self._stand = stand
        self.since = self._quiet_since = self._looked = now
        self._signs: _Signs | None = None
        self._only_spins = True
        self._variables: int | None = None
        self._is_same_again = True
        self.state = ""

    def sample(self, frame: FrameType, now: float) -> None:
        """Note where the thread is now. Call it often: it is cheap while the thread moves."""
        stand = _Stand.of(frame)
        if self._stand is None or not stand.is_near(self._stand):
            self._begin(stand, now)
        elif self._can_look and now >= self._looked + LOOK_S:
            try:
                self._look(frame, now)
            except OSError:  # a kernel without these counters, or a container that hides them
                self._can_look = False
        instruction = opname[frame.f_code.co_code[frame.f_lasti]] if self._only_spins else ""
        self._only_spins = is_users(frame) and _SPINS.search(instruction) is not None

    def _look(self, frame: FrameType, now: float) -> None:
        before, signs = self._signs, _Signs.of(self._task)
        self._signs, seconds, self._looked = signs, now - self._looked, now
        if before is None:
            return
        share = (signs.cpu_ns - before.cpu_ns) / 1e9 / seconds
        if share > _BUSY_SHARE:
            self._note_variables(frame)
        is_loop = share > _BUSY_SHARE and self._only_spins and self._is_same_again
        is_busy = share > _IDLE_SHARE and not is_loop
        waits = is_waiting(frame)
        moves = is_busy or (signs.is_ready and share <= _BUSY_SHARE) or signs.shows_work_since(before, seconds)
        if moves and (not waits or is_in_collective(frame)):
            self.since = now  # a wait for a GPU may use a CPU, and counts as a standstill all the same
        takes_stacks = signs.written != before.written
        if self.since == now or (signs.cpu_ns != before.cpu_ns and not takes_stacks):
            self._quiet_since = now
        self.place = call_in(frame) if waits else self._stuck_at(frame)
        self.state = self._state(frame, waits, share, now) if now - self.since >= STANDING_S - LOOK_S else ""

    def _state(self, frame: FrameType, waits: bool, share: float, now: float) -> str:
        if not waits:
            return "loops" if share > _BUSY_SHARE else "stuck"
        is_quiet = now - self._quiet_since >= STANDING_S - LOOK_S
        return "blocked" if is_quiet and is_in_collective(frame) else "waits"

    def _stuck_at(self, frame: FrameType) -> str:
        """Return the user's line, and the function of a library that it called."""
        library = next((one for one in outwards(frame) if one.f_back is not None and is_users(one.f_back)), None)
        if library is None or is_users(frame):
            return place_of(frame)
        module = str(library.f_globals.get("__name__", "")).rpartition(".")[2]
        return f"{place_of(frame)}, in {module}.{library.f_code.co_name}"

    # -- endless loops --------------------------------------------------------------------------------------------

    def _note_variables(self, frame: FrameType) -> None:
        """Note whether a loop that calls nothing changes any variable."""
        users, variables = next(filter(is_users, outwards(frame)), None), None
        with contextlib.suppress(Exception):  # attributes and numbers of the user's own classes may raise anything
            variables = None if users is None else _hash_of_variables(users)
        self._is_same_again = self._variables in (None, variables) and variables is not None
        self._variables = variables


@dataclass(frozen=True, slots=True)
class _Stand:
    """Where a thread is. inner: the innermost function of the user. outer: the lines of its callers."""

    inner: CodeType
    outer: tuple[tuple[CodeType, int], ...]

    @classmethod
    def of(cls, frame: FrameType) -> _Stand:
        frames = list(outwards(frame))
        users = next((number for number, one in enumerate(frames) if is_users(one)), 0)
        outer = tuple((one.f_code, one.f_lasti) for one in frames[users + 1 :])
        return cls(frames[users].f_code, outer)

    def is_near(self, other: _Stand) -> bool:
        return self.inner is other.inner and self.outer == other.outer


@dataclass(frozen=True, slots=True)
class _Signs:
    """Counters that grow while a thread gets something done.

    cpu_ns: of the thread. help_s: CPU seconds of other threads and of child processes. moved: bytes that the thread has
    read, and collectives of the process. written: bytes, also of stacks that were asked for. faults: page faults.
    received: bytes over TCP. disk: bytes that disks of the host have transferred. is_ready: it waits for a CPU only.
    waits_for_disk: it is in an uninterruptible wait.
    """

    cpu_ns: int
    help_s: float
    moved: tuple[object, ...]
    written: int
    received: int
    disk: int
    faults: int
    is_ready: bool
    waits_for_disk: bool

    @classmethod
    def of(cls, task: Path) -> _Signs:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        cpu_ns = int((task / "schedstat").read_text().split()[0])
        read, written = (line.split()[1] for line in (task / "io").read_text().splitlines()[:2])
        return cls(
            cpu_ns=cpu_ns,
            help_s=time.process_time() - time.thread_time() - cpu_ns / 1e9 + _seconds_of_children(),
            moved=(read, flight_recorder.counts()),
            written=int(written),
            received=_tcp_bytes(),
            disk=_disk_bytes(),
            faults=int(fields[7]) + int(fields[9]),
            is_ready=fields[0] == "R",
            waits_for_disk=fields[0] == "D",
        )

    def shows_work_since(self, before: _Signs, seconds: float) -> bool:
        return (
            self.moved != before.moved
            or self.faults - before.faults > _FEW_FAULTS * seconds
            or self.written - before.written > _LARGEST_STACKS * seconds
            or self.help_s - before.help_s > _IDLE_SHARE * seconds
            or abs(self.received - before.received) > _MOVING_BYTES * seconds
            or (self.waits_for_disk and self.disk - before.disk > _DISK_BYTES * seconds)
        )


def _seconds_of_children() -> float:
    """Return the CPU seconds of the child processes, those that have ended included."""
    times = os.times()
    seconds = times.children_user + times.children_system
    parents = ["self"]
    while parents:
        for file in Path("/proc", parents.pop(), "task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                for child in file.read_text().split():
                    parents.append(child)
                    fields = Path("/proc", child, "stat").read_text().rpartition(")")[2].split()
                    seconds += (int(fields[11]) + int(fields[12])) / _TICKS
    return seconds


def _tcp_bytes() -> int:
    """Return the bytes that the open sockets of this process have sent and received."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM) as opened:  # closes a copy only
                    info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += sum(int.from_bytes(info[at], sys.byteorder) for at in _TCP_BYTES_AT)
    return total


def _disk_bytes() -> int:
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path("/proc/diskstats").read_text().splitlines()]
        return _SECTOR * sum(int(row[5]) + int(row[9]) for row in rows)
    return 0


def _hash_of_variables(frame: FrameType) -> int:
    """Return a number that changes if a variable of a function does: a number, another object, a length, an attribute.

    The attributes of its objects count, too, and the numbers among the module's variables.
    """
    found = frame.f_locals
    values = [*found.values(), *map(frame.f_globals.get, frame.f_code.co_names)]
    attributes = [one for value in values for one in _attributes(value)]
    number = hash(tuple(map(_trait, [*values, *attributes])))
    if sys.version_info < (3, 13) and frame.f_locals is not frame.f_globals and sys.getrefcount(found) <= 3:
        found.clear()  # a copy, which would keep alive what train_func deletes
    return number


def _attributes(value: object) -> list[Any]:
    attributes = getattr(value, "__dict__", None)
    is_object = isinstance(attributes, dict) and not isinstance(value, (type, ModuleType))
    return list(attributes.values()) if is_object and attributes else []


def _trait(value: object) -> object:
    if isinstance(value, (int, float, complex)):
        return value
    return id(value), len(value) if isinstance(value, _CONTAINERS) else None

"""Evidence that a thread stands still: it waits for something that does not come. Runs in: worker.

A thread that stays in the same function may still be busy. It counts as moving if it computes, if other threads or
child processes do, or if it reads, writes, or receives data.
"""

from __future__ import annotations

import contextlib
import dis
import fcntl
import math
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.worker import flight_recorder
from distrain.worker.places import (
    call_in,
    is_asking,
    is_in_backward_on_cpu,
    is_in_collective,
    is_in_debugger,
    is_users,
    is_waiting,
    outwards,
    stuck_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

LOOK_S = 1.0
"""Seconds between two looks at a thread that stays where it is."""
STANDING_S = 3.0
"""Seconds after which a standstill counts as one."""
_IN_KERNEL_S = 60.0
"""The limit for uninterruptible waits in the kernel: a busy disk or network file system looks like a frozen one."""
_IDLE_SHARE = 0.05
"""A thread that waits in a loop, polling, uses less of a CPU than this; so do helpers that help with nothing."""
_STARTING_S = 2e-4
"""A thread that starts processes uses more of a CPU than this; one that sleeps while others do so uses less."""
_PROGRESS = {
    "help_s": _IDLE_SHARE,
    "read": 0,
    "written": 0,
    "network": 2048,
    "faults": 50,
    "collectives": 0,
}
"""By counter: a thread gets something done if it grows by more than this per second.

help_s: CPU seconds of other threads and of child processes. read, written: bytes of this thread. network: bytes of this
process; heartbeats are less. faults: page faults of the thread. collectives: of the process.
"""
_STACKS_S = 3.0
"""Seconds in which a thread may write its stacks, which is not its own work."""
_SPINS = re.compile(r".*JUMP|LOAD|STORE|COMPARE|CONTAINS|IS_OP|UNARY_NOT|TO_BOOL|NOP|NOT_TAKEN|EXTENDED_ARG")
"""Instructions of a loop that only looks at variables."""
_TCP_BYTES_AT = slice(120, 128), slice(128, 136)
"""The offsets of tcpi_bytes_acked and tcpi_bytes_received in ``struct tcp_info`` (linux/tcp.h)."""
_SIOCGSTAMP = 0x8906
_TICKS = os.sysconf("SC_CLK_TCK")


class Standstill:
    """The standstill of one thread of this process, if it is in one.

    state: empty while it moves. ``asks``: it waits for distrain. The other states need Linux, which counts what a
    thread does. ``waits``: for other ranks. ``blocked``: for them, in a blocking collective.
    ``loops``: in an endless loop. ``stuck``: it waits for something else.
    since: when it came to this place (time.monotonic).
    """

    def __init__(self, native_id: int) -> None:
        self._task = Path("/proc/self/task", str(native_id))
        self.listen: Callable[[], object] = lambda: None
        """Handles messages, which may call :meth:`expect_stacks`."""
        self._can_look = True
        self._stacks_until = 0.0
        self.begin((), time.monotonic())
        self._asks_since = self.since

    def begin(self, where: tuple[object, ...], now: float) -> None:
        """Note that the thread came to another place, or was not seen for a long time."""
        self._where = where
        self.since = self._looked = now
        self._counted: dict[str, float] = {}
        self._seen: set[tuple[CodeType, int]] = set()
        """The instructions that it was at since the last look."""
        self._limit_s = STANDING_S
        self.state = self.place = ""

    def expect_stacks(self, now: float) -> None:
        """Note that the thread may be about to write its stacks."""
        self._stacks_until = now + _STACKS_S

    def sample(self, frame: FrameType, now: float) -> None:
        """Note where the thread is now. Call it often: it is cheap while the thread moves."""
        if is_in_debugger(frame):  # what a person does there is not the thread's progress
            self._looked, self._counted = now, {}
            return
        is_answered = not is_asking(frame)
        if (where := _where(frame)) != self._where or (is_answered and self.state == "asks"):
            self.begin(where, now)
        if is_answered:
            self._asks_since = now
        elif now - self._asks_since >= STANDING_S:
            self.state, self.place, self.since = "asks", call_in(frame), self._asks_since
            return
        self._seen.add((frame.f_code, frame.f_lasti))
        if self._can_look and now >= self._looked + LOOK_S:
            try:
                self._look(frame, now)
            except OSError:  # a kernel without these counters, or a container that hides them
                self._can_look = False

    def _look(self, frame: FrameType, now: float) -> None:
        before, (kernel_state, self._counted) = self._counted, _count(self._task)
        self.listen()  # after counting: news of stacks comes before the stacks
        seen, self._seen = self._seen, set()
        seconds, self._looked = now - self._looked, now
        if not before:
            return
        grown = {name: abs(self._counted[name] - before[name]) / seconds for name in before}
        if now < self._stacks_until:
            grown["written"] = 0.0
        is_busy = grown["cpu_s"] > _IDLE_SHARE or kernel_state == "R"
        is_loop = is_busy and all(_spins(code, at) for code, at in seen)
        moves = (is_busy and not is_loop) or any(grown[name] > least for name, least in _PROGRESS.items())
        moves = moves or (grown["reaped"] > 0 and grown["cpu_s"] > _STARTING_S)
        waits, blocks = is_waiting(frame), is_in_collective(frame) or is_in_backward_on_cpu(frame)
        if moves and (blocks or not waits):  # a wait for a GPU may use a CPU, and is a standstill all the same
            self.since, self._limit_s = now, STANDING_S
        if kernel_state == "D":
            self._limit_s = _IN_KERNEL_S
        self.state = self.place = ""
        if now - self.since >= self._limit_s:
            self.state = "blocked" if blocks else "waits" if waits else "loops" if is_loop else "stuck"
            self.place = call_in(frame) if waits else stuck_at(frame)


def _where(frame: FrameType) -> tuple[object, ...]:
    """Return the user's innermost function, and the lines of its callers: they stay the same in a standstill."""
    frames = list(outwards(frame))
    users = next((number for number, one in enumerate(frames) if is_users(one.f_code)), 0)
    return frames[users].f_code, *((one.f_code, one.f_lasti) for one in frames[users + 1 :])


def _spins(code: CodeType, at: int) -> bool:
    """Return whether an instruction is in a loop that only looks at variables, and so changes none."""
    instructions = list(dis.get_instructions(code))
    jumps = [one for one in instructions if "JUMP" in one.opname and one.argval <= at <= one.offset]
    jump = min(jumps, key=lambda one: one.offset - one.argval, default=None)
    return jump is not None and all(
        _SPINS.match(one.opname) for one in instructions if jump.argval <= one.offset <= jump.offset
    )


# -- counters --------------------------------------------------------------------------------------------------------


def _count(task: Path) -> tuple[str, dict[str, float]]:
    """Return the state of a thread, as ps shows it, and the counters of what it gets done."""
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    cpu_s = int((task / "schedstat").read_text().split()[0]) / 1e9
    read, written = (int(line.split()[1]) for line in (task / "io").read_text().splitlines()[:2])
    return fields[0], {
        "cpu_s": cpu_s,
        "help_s": time.process_time() - time.thread_time() - cpu_s + seconds_of_children(),
        "read": read,
        "written": written,
        "network": _network_use(),
        "faults": int(fields[7]) + int(fields[9]),
        "collectives": hash(flight_recorder.counts()),
        "reaped": int(fields[8]) + int(fields[10]),  # page faults of child processes that have ended
    }


def seconds_of_children(root: str = "self") -> float:
    """Return the CPU seconds of the child processes of a process, those that have ended included."""
    fields = Path("/proc", root, "stat").read_text().rpartition(")")[2].split()
    seconds = sum(map(int, fields[13:15])) / _TICKS
    parents = [root]
    while parents:
        for file in Path("/proc", parents.pop(), "task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                for child in file.read_text().split():
                    parents.append(child)
                    fields = Path("/proc", child, "stat").read_text().rpartition(")")[2].split()
                    seconds += sum(map(int, fields[11:15])) / _TICKS
    return seconds


def idle_seconds_of(pid: int) -> float:
    """Return a number that stays the same while a process makes no progress: CPU seconds that it used or waited for.

    It is infinite while the kernel may do something for the process, and if the process is gone.
    """
    with contextlib.suppress(OSError):
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        waited_s = int(Path("/proc", str(pid), "schedstat").read_text().split()[1]) / 1e9
        if fields[0] != "D":
            return sum(map(int, fields[11:13])) / _TICKS + waited_s + seconds_of_children(str(pid))
    return math.inf


def _network_use() -> int:
    """Return the bytes that TCP sockets of this process sent and received, and when other sockets received (in µs).

    Those of torch's store don't count: it is on rank 0, and every rank keeps looking into it.
    """
    total, store = 0, os.environ.get("MASTER_PORT")
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM) as opened:  # closes a copy only
                    if opened.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_DGRAM:
                        stamp = fcntl.ioctl(opened, _SIOCGSTAMP, bytes(16))
                        seconds, micros = (int.from_bytes(part, sys.byteorder) for part in (stamp[:8], stamp[8:]))
                        total += 1_000_000 * seconds + micros
                        continue
                    info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    if store in (str(opened.getsockname()[1]), str(opened.getpeername()[1])):
                        continue
                total += sum(int.from_bytes(info[at], sys.byteorder) for at in _TCP_BYTES_AT)
    return total

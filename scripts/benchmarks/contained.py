"""Run one command at a time, measure its time from its start, and leave no process of it behind.

This process becomes the subreaper. So every process that a run starts stays a descendant, including daemons in their
own sessions. The memory of a run is the memory of all descendants. A run has ended when all of them have ended. Nothing
is killed by name.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

LEAVE_WITHIN_S = 5.0
KILLED_WITHIN_S = 10.0
LOOK_EVERY_S = 0.02

PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1

libc = ctypes.CDLL(None, use_errno=True)


class RunFailedError(Exception):
    """A run without a result. The text is one line with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that has ended: its folder, begin and end (time.time()), exit code, and number of killed processes.

    cpu_s: CPU seconds of all its processes, user and system.
    """

    out: Path
    begun: float
    ended: float
    exit_code: int
    killed: int
    cpu_s: float

    def value(self, name: str) -> Any:
        """Return what a program wrote under this name. Raises RunFailedError if it wrote nothing."""
        try:
            return json.loads((self.out / f"{name}.json").read_text())
        except FileNotFoundError:
            raise RunFailedError(self.how_it_ended()) from None

    def of_ranks(self, name: str, workers: int) -> list[Any]:
        return [self.value(f"{name}_{rank}") for rank in range(workers)]

    def how_it_ended(self) -> str:
        return f"exit code {self.exit_code}: {last_line(self.out / 'output')}"

    def remarks(self) -> list[str]:
        """Return what is unusual about a run that has done its work."""
        remarks = [f"then {self.how_it_ended()}"] if self.exit_code else []
        return [*remarks, f"left {self.killed} processes"] if self.killed else remarks


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process of a run and its proportional set size."""

    pid: int
    pss_mb: float


def become_subreaper() -> None:
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def enter_network_namespace() -> None:
    """Enter a network that has only a loopback interface. Raises OSError if that is not allowed."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNET | (CLONE_NEWUSER if user else 0)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def run_contained(
    command: Sequence[str],
    *,
    out: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    while_running: Callable[[Callable[[], bool]], None] | None = None,
) -> Finished:
    """Run the command to its end, with its output in ``out/output``. No process of it is left afterwards.

    while_running: called once with a function that returns True if the command has ended or its time is over.
    Raises RunFailedError after ``timeout_s``.
    """
    deadline, cpu_before_s = time.monotonic() + timeout_s, _cpu_of_children_s()
    with open(out / "output", "wb") as output, no_descendants_left() as killed:
        begun = time.time()
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            cwd=out,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if while_running:
            while_running(lambda: process.poll() is not None or time.monotonic() > deadline)
        if not _has_ended(process, deadline):
            raise RunFailedError(f"no end after {timeout_s:g} s: {last_line(out / 'output')}")
        ended = time.time()
        process.wait()
    cpu_s = _cpu_of_children_s() - cpu_before_s
    return Finished(out=out, begun=begun, ended=ended, exit_code=process.returncode, killed=killed[0], cpu_s=cpu_s)


def _cpu_of_children_s() -> float:
    """Return the CPU seconds of all descendants that have ended: each was waited for, by its parent or by this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _has_ended(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait until the process has ended, and return False after the deadline. Popen.wait(timeout) polls every 50 ms."""
    if process.poll() is not None:
        return True
    descriptor = os.pidfd_open(process.pid)
    try:
        return bool(select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0])
    finally:
        os.close(descriptor)


@contextmanager
def no_descendants_left() -> Iterator[list[int]]:
    """Kill the descendants that have not ended by themselves. The list then contains their number.

    After a failure or Ctrl-C, kill them without waiting.
    """
    killed = [0]
    grace_s = 0.0
    try:
        yield killed
        grace_s = LEAVE_WITHIN_S
    finally:
        until = time.monotonic() + grace_s
        while descendants() and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)
        until = time.monotonic() + KILLED_WITHIN_S
        seen: set[int] = set()
        while (left := descendants()) and time.monotonic() < until:
            seen.update(member.pid for member in left)
            for member in left:
                _kill(member.pid)
            time.sleep(LOOK_EVERY_S)
        killed[0] = len(seen)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def descendants() -> list[psutil.Process]:
    """Return the living descendants, and reap dead orphans."""
    living = []
    for member in psutil.Process().children(recursive=True):
        try:
            if member.status() != psutil.STATUS_ZOMBIE:
                living.append(member)
            elif member.ppid() == os.getpid():
                os.waitpid(member.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return living


def look_at_memory() -> list[Member]:
    """Return all processes of the run, with their memory."""
    members = []
    for member in descendants():
        try:
            members.append(Member(pid=member.pid, pss_mb=member.memory_full_info().pss / 1e6))
        except psutil.NoSuchProcess:
            continue
    return members


def last_line(path: Path) -> str:
    """Return the last line that names an error, else the last line with text."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception|Killed|Timeout)\b.*: \S", line)]
    spoken = [line for line in lines if re.search(r"\w", line)]
    return (errors or spoken or ["no output"])[-1]

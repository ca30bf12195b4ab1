"""Outlives an agent that is killed, and empties the host then. Runs in: guard.

An agent begins as a guard that forks the agent proper. So every process of the host, whoever its parent was, has three
ancestors of ours: forkserver, agent and guard. Any two of them may be killed at once: the third adopts and kills what
is left. The guard also ends an agent that does not live any more without being dead: one that was stopped (SIGSTOP).
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
from typing import NoReturn

from distrain.system import process, scratch
from distrain.system.loop import Loop

_MARGIN_S = 2.0
"""A coordinator that lives notices before the guard that an agent is silent, and reports it."""
_LEAVING_S = 2.5
"""How long an agent may take to empty its host after the coordinator's end."""


def stand_guard(coordinator_fd: int, scratch_path: str | None) -> int:
    """Fork: the child returns and goes on as the agent, this process becomes its guard and never returns.

    ``coordinator_fd``: a pidfd, or -1 if it cannot be seen. ``scratch_path``: is removed in the end. Returns the
    descriptor for :func:`beat`. Where there are no pidfds (macOS, before Linux 5.3) there is no guard either, and it
    returns -1.
    """
    if not process.has_pidfds():
        return -1
    gc.freeze()  # what both have in memory stays shared
    read_fd, write_fd = os.pipe()
    agent = os.fork()
    if agent != 0:
        os.close(write_fd)
        _Guard(agent, read_fd, coordinator_fd, scratch_path).run()
    os.close(read_fd)
    os.set_blocking(write_fd, False)
    return write_fd


def beat(fd: int, lease_s: float) -> None:
    """Tell the guard that the agent lives, and for how long it may be silent from now on."""
    if fd >= 0:
        with contextlib.suppress(OSError):  # the guard's end is noticed by its pidfd
            os.write(fd, f"{lease_s}\n".encode())


class _Guard:
    def __init__(self, agent: int, beats_fd: int, coordinator_fd: int, scratch_path: str | None) -> None:
        self._agent = agent
        self._beats_fd = beats_fd
        self._coordinator_fd = coordinator_fd
        self._scratch_path = scratch_path
        self._loop = Loop()
        self._heard_at = 0.0
        self._lease_s = 0.0

    def run(self) -> NoReturn:
        process.show_as("distrain-guard")  # so that `killall -9 python` spares it
        process.adopt_orphans()
        devnull = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):  # the wire is the agent's, and ends with it
            os.dup2(devnull, fd)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._loop.on_signals((signal.SIGTERM,), lambda number: process.kill(self._agent, number))
        self._loop.on_readable(process.open_pidfd(self._agent), self._loop.stop)
        self._loop.on_readable(self._beats_fd, self._on_beat)
        if self._coordinator_fd >= 0:
            self._loop.on_readable(self._coordinator_fd, self._on_coordinators_end)
        scratch.remove_abandoned()
        self._loop.run()
        self._leave()

    def _on_beat(self) -> None:
        data = os.read(self._beats_fd, 4096)
        if not data:
            self._loop.forget(self._beats_fd)
            return
        self._heard_at, self._lease_s = self._loop.now, float(data.split()[-1])
        self._check()

    def _check(self) -> None:
        if self._loop.silence_s(self._heard_at) > self._lease_s + _MARGIN_S:
            self._loop.stop()
        self._loop.call_in("check", self._lease_s / 3, self._check)

    def _on_coordinators_end(self) -> None:
        self._loop.forget(self._coordinator_fd)
        self._loop.call_in("leave", _LEAVING_S, self._loop.stop)

    def _leave(self) -> NoReturn:
        """End as the agent has ended, for whoever has started it to see."""
        process.kill(self._agent, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self._agent, 0)[1])
        process.kill_descendants()
        scratch.remove(self._scratch_path)
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with contextlib.suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            process.kill(os.getpid(), -code)
        os._exit(code)

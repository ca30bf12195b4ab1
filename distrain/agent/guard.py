"""The guard: empties the host if the agent is killed or stopped (SIGSTOP). Runs in: guard.

The process that the coordinator starts becomes the guard and forks the agent. So all processes of a host have three
ancestors that belong to distrain: forkserver, agent and guard. If any two of them are killed at once, the third adopts
and kills the processes that are left.
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
"""Seconds that the guard waits longer than the lease, so that the coordinator can notice the silence first."""
_LEAVING_S = 2.5
"""Seconds that the agent may be silent after the end of the coordinator, or of the ssh connection, as it empties its
host."""


def scheduler_signals() -> tuple[signal.Signals, ...]:
    """Return the signals with which Slurm announces the end of this process's job; none outside of a job step.

    Slurm sends them to the step, which is the guard, or all processes of the host. The coordinator decides what to do.
    """
    if "SLURM_STEP_ID" not in os.environ:
        return ()
    return (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def stand_guard(parent_fd: int, scratch_path: str | None) -> int:
    """Fork: the child returns and is the agent. This process becomes the guard and never returns.

    Return the descriptor for :func:`beat`, or -1 where there are no pidfds (Linux before 5.3): there is no guard
    then.

    parent_fd: pidfd of the process that has started this one: the coordinator, or the server of ssh.
    scratch_path: a directory that the guard removes at its end.
    """
    if not process.has_pidfds():
        return -1
    gc.freeze()  # a collection would copy pages that both share
    read_fd, write_fd = os.pipe()
    agent = os.fork()
    if agent != 0:
        os.close(write_fd)
        _Guard(agent, read_fd, parent_fd, scratch_path).run()
    os.close(read_fd)
    os.set_blocking(write_fd, False)
    return write_fd


def beat(fd: int, lease_s: float) -> None:
    """Send the guard a sign of life, and how long the agent may be silent from now on."""
    if fd >= 0:
        with contextlib.suppress(OSError):  # the end of the guard is noticed by its pidfd
            os.write(fd, f"{lease_s}\n".encode())


def clear_cache() -> None:
    """Delete what a killed agent has left in the cache of this host."""
    from distrain.transfer.host_side.host_cache import HostCache, usual_root

    with contextlib.suppress(OSError):
        if usual_root().is_dir():  # most hosts have none
            HostCache().trim()


class _Guard:
    def __init__(self, agent: int, beats_fd: int, parent_fd: int, scratch_path: str | None) -> None:
        self._agent = agent
        self._beats_fd = beats_fd
        self._parent_fd = parent_fd
        self._scratch_path = scratch_path
        self._loop = Loop()
        self._has_parent = True
        self._heard_at = 0.0
        self._lease_s = 0.0

    def run(self) -> NoReturn:
        process.show_as("distrain-guard")  # `killall -9 python` does not find it
        process.show_program("guard", "of", "the", "agent")
        process.adopt_orphans()
        devnull = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):  # the coordinator must see the end of the agent
            os.dup2(devnull, fd)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        forwarded = {signal.SIGTERM, *scheduler_signals()}
        self._loop.on_signals(forwarded, lambda number: process.kill(self._agent, number))
        self._loop.on_readable(process.open_pidfd(self._agent), self._loop.stop)
        self._loop.on_readable(self._beats_fd, self._on_beat)
        if self._parent_fd >= 0:
            self._loop.on_readable(self._parent_fd, self._on_parents_end)
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
        if not self._has_parent:  # it stores a checkpoint, for a limited time
            self._await_end()

    def _check(self) -> None:
        if self._loop.silence_s(self._heard_at) > self._lease_s + _MARGIN_S:
            self._loop.stop()
        self._loop.call_in("check", self._lease_s / 2, self._check)

    def _on_parents_end(self) -> None:
        self._loop.forget(self._parent_fd)
        self._has_parent = False
        self._await_end()

    def _await_end(self) -> None:
        self._loop.call_in("leave", _LEAVING_S, self._loop.stop)

    def _leave(self) -> NoReturn:
        """Empty the host, and end with the exit code or signal of the agent, which ssh or the coordinator sees."""
        process.kill(self._agent, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self._agent, 0)[1])
        process.end_descendants()
        scratch.remove(self._scratch_path)
        clear_cache()
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with contextlib.suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            process.kill(os.getpid(), -code)
        os._exit(code)

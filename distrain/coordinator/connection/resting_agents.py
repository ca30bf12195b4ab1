"""Agents of this machine that rest between two fit() of this process, each with its forkserver. Runs in: coordinator.

A later fit() takes one over, so that it need not import torch again. An agent is taken over only if nothing that it has
inherited from this process has changed. Each ends with this process, and after a limited time.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.coordinator.connection.agent_link import CLOSE_TIMEOUT_S, AgentLink, close_all

if TYPE_CHECKING:
    from collections.abc import Sequence

_VARIABLE = "DISTRAIN_IDLE_S"
_DEFAULT_IDLE_S = 300.0
_MARGIN_S = 10.0
"""Seconds before its end from which an agent is no longer taken over."""
_INHERITED = (
    *("Umask:", "Uid:", "Gid:", "Groups:", "CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "NoNewPrivs:", "Seccomp:"),
    *("SigIgn:", "SigBlk:", "Cpus_allowed:", "Mems_allowed:", "THP_enabled:"),
)
"""Fields of /proc/PID/status that a child inherits."""
_INHERITED_FILES = ("limits", "cgroup", "oom_score_adj", "timerslack_ns")

InheritedState = tuple[object, ...]
"""Everything that an agent has inherited from this process. Two agents with equal state are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestingAgent:
    """An agent without a run.

    expires_at: when it is no longer taken over (time.monotonic).
    """

    link: AgentLink
    inherited_state: InheritedState
    expires_at: float


_resting: list[RestingAgent] = []
_lock = threading.Lock()


def idle_s() -> float:
    """Return for how many seconds an agent rests, 0 for not at all. Raises ValueError for a bad DISTRAIN_IDLE_S."""
    text = os.environ.get(_VARIABLE, "") or str(_DEFAULT_IDLE_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{_VARIABLE}={text!r}: must be the number of seconds to keep a forkserver (0: none)")
    return seconds


def inherited_state(argv: Sequence[str]) -> InheritedState:
    """Return what an agent inherits if it is started now. argv: its command line, without the ids of the run."""
    own = Path("/proc/thread-self")
    try:
        status = [line for line in (own / "status").read_text().splitlines() if line.startswith(_INHERITED)]
        files = [(own / name).read_text() for name in _INHERITED_FILES if (own / name).exists()]
        priority = os.getpriority(os.PRIO_PROCESS, 0)
        namespaces = sorted(os.readlink(entry) for entry in (own / "ns").iterdir())
    except OSError:  # no such /proc: then nothing is ever equal
        return (object(),)
    return (*argv, os.getcwd(), dict(os.environ), priority, *status, *files, *namespaces)


def keep(link: AgentLink, inherited: InheritedState) -> bool:
    """Let an agent rest until another fit() takes it over. Return False if it cannot: close it then."""
    seconds = idle_s()
    if seconds <= _MARGIN_S or not link.rest(seconds, time.monotonic() + CLOSE_TIMEOUT_S):
        return False
    expires_at = time.monotonic() + seconds - _MARGIN_S
    with _lock:
        _resting.append(RestingAgent(link=link, inherited_state=inherited, expires_at=expires_at))
    return True


def take(inherited: InheritedState) -> AgentLink | None:
    """Return an agent that has inherited the same; None if there is none. Close those that are no longer of use."""
    with _lock:
        usable = [agent for agent in _resting if agent.link.is_alive and time.monotonic() < agent.expires_at]
        fitting = [agent for agent in usable if agent.inherited_state == inherited]
        useless = [agent for agent in _resting if agent not in fitting]
        _resting[:] = fitting[:-1]
    close_all([agent.link for agent in useless])
    return fitting[-1].link if fitting else None


def close() -> None:
    """End all resting agents."""
    with _lock:
        links = [agent.link for agent in _resting]
        _resting.clear()
    close_all(links)


def _forget() -> None:
    """Leave the agents to the parent, in a process that was forked from it."""
    global _lock
    _lock = threading.Lock()
    for agent in _resting:
        agent.link.abandon()
    _resting.clear()


atexit.register(close)
os.register_at_fork(after_in_child=_forget)

"""The hosts of a run: which are connected, which were lost, and which to connect for an attempt. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distrain.config import ScalingConfig
    from distrain.hosts.host import HostInfo

HOST_ANSWER_TIMEOUT_S = 60.0
"""Seconds to wait for the HELLO of a new agent, and for its ports, before its host counts as lost."""
RECONNECT_INTERVAL_S = 2.0
"""Seconds to wait after a failed connection to a lost host before the next one."""


class Readiness(enum.Enum):
    """Readiness of the hosts for an attempt."""

    READY = "ready"
    WAITING = "waiting"  # hosts may still answer
    HOPELESS = "hopeless"  # too few slots, even if every host answers


class HostPool:
    """The hosts of a run.

    slots: how many ranks each host takes (None: any number), in the order of placement.

    While the connected hosts have too few slots for all workers, the pool connects further hosts: first the spare hosts
    that were not needed before, then those that were lost. A run of ``(min, max)`` workers may start with ``min`` once
    every contacted host has answered or was given up.
    """

    def __init__(self, slots: Mapping[str, int | None], scaling: ScalingConfig) -> None:
        self.losses: dict[str, str] = {}
        """The lost hosts, and why each was lost."""
        self._slots = {name: math.inf if most is None else most for name, most in slots.items()}
        self._most = min(scaling.max_workers, self._slots_of(self._slots))
        self._least = min(scaling.min_workers, self._most)
        self._connected: dict[str, HostInfo] = {}
        self._contacted_at: dict[str, float] = {}
        """The hosts whose agents are starting, and since when."""
        self._reconnect_at: dict[str, float] = {}
        self._reconnect_failure: dict[str, str] = {}
        self._reconnect_until = -math.inf
        self._wait_until = math.inf

    def begin_search(self, now: float, *, reconnect_s: float, wait_s: float) -> None:
        """Begin to look for hosts for an attempt.

        reconnect_s: how long to reconnect lost hosts again and again while there are too few slots without them. Each
            lost host is tried at least once.
        wait_s: how long to wait for hosts that the run can do without.
        """
        self._reconnect_until = now + reconnect_s
        self._wait_until = now + wait_s
        self._reconnect_at = dict.fromkeys(self.losses, now)

    # -- connected and lost hosts ---------------------------------------------------------------------------------

    @property
    def connected(self) -> list[HostInfo]:
        """The hosts whose agents have sent HELLO, in the order of placement."""
        return [self._connected[name] for name in self._slots if name in self._connected]

    def mark_connected(self, host: str, info: HostInfo) -> None:
        """Note the HELLO of a host."""
        self._connected[host] = info
        for noted in (self.losses, self._contacted_at, self._reconnect_failure):
            noted.pop(host, None)

    def mark_lost(self, host: str, why: str, now: float) -> None:
        """Note that a host was lost, or could not be connected."""
        self._connected.pop(host, None)
        was_contacted = self._contacted_at.pop(host, None) is not None
        self._reconnect_at[host] = now + RECONNECT_INTERVAL_S * was_contacted
        if host in self.losses:
            self._reconnect_failure[host] = why
        self.losses.setdefault(host, why)

    def is_lost(self, host: str) -> bool:
        """Return True if the host was lost and is not being reconnected."""
        return host in self.losses and host not in self._contacted_at

    def describe_losses(self, hosts: Iterable[str] | None = None) -> str:
        """Return a line for each lost host (of ``hosts``, if given) that says why it was lost."""
        lost = [host for host in self.losses if hosts is None or host in hosts]
        return "\n".join(f"{host}: {self.losses[host]}{self._describe_reconnect(host)}" for host in lost)

    def _describe_reconnect(self, host: str) -> str:
        return f"\n    tried again: {self._reconnect_failure[host]}" if host in self._reconnect_failure else ""

    # -- the search -----------------------------------------------------------------------------------------------

    def hosts_to_connect(self, now: float) -> list[str]:
        """Choose the hosts to connect now, and note that they are contacted.

        Hosts that were contacted too long ago, and have not answered, count as lost.
        """
        for host, since in list(self._contacted_at.items()):
            if now >= since + HOST_ANSWER_TIMEOUT_S:
                self.mark_lost(host, f"no answer within {HOST_ANSWER_TIMEOUT_S:g} s", now)
        chosen = []
        for host in sorted(self._slots, key=self.losses.__contains__):
            if self._slots_of([*self._connected, *self._contacted_at]) >= self._most:
                break
            if self._may_connect(host) and self._reconnect_at.get(host, now) <= now:
                self._contacted_at[host] = now
                chosen.append(host)
        return chosen

    def readiness(self, now: float) -> Readiness:
        """Return whether an attempt can start.

        It waits for every contacted host, so that placement does not depend on which host answers first.
        """
        slots = self._slots_of(self._connected)
        if slots >= self._least and (not self._contacted_at or now >= self._wait_until):
            return Readiness.READY
        possible = [*self._contacted_at, *filter(self._may_connect, self._slots)]
        return Readiness.WAITING if slots + self._slots_of(possible) >= self._least else Readiness.HOPELESS

    def deadline(self) -> float:
        """Return when :meth:`hosts_to_connect` or :meth:`readiness` may have a new answer if no host answers before."""
        moments = [since + HOST_ANSWER_TIMEOUT_S for since in self._contacted_at.values()]
        if self._slots_of([*self._connected, *self._contacted_at]) < self._most:
            moments += [self._reconnect_at[host] for host in self.losses if self._may_connect(host)]
        if self._slots_of(self._connected) >= self._least:
            moments.append(self._wait_until)
        return min(moments, default=math.inf)

    def _may_connect(self, host: str) -> bool:
        if host in self._connected or host in self._contacted_at:
            return False
        return host not in self.losses or self._reconnect_at[host] <= self._reconnect_until

    def _slots_of(self, hosts: Iterable[str]) -> float:
        return sum(self._slots[host] for host in hosts)

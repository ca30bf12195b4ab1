"""Which hosts are there, which were lost, and whom to ask next for an attempt. Runs in: coordinator.

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

CONNECT_TIMEOUT_S = 60.0
"""For the HELLO of an agent that is being started."""
RECONNECT_INTERVAL_S = 2.0
"""Between two tries to reach a lost host."""


class Readiness(enum.Enum):
    """Whether an attempt can start."""

    READY = "ready"
    WAITING = "waiting"  # hosts may still answer
    HOPELESS = "hopeless"  # too few slots, whoever answers


class HostPool:
    """The hosts of a run. ``slots``: how many ranks each takes (None: any number), in the order of placement.

    As long as the hosts that are there have too few slots for all workers, others are asked: first those that were not
    needed before, then those that were lost. A run of ``(min, max)`` workers may start with ``min`` once everybody has
    answered or was given up.
    """

    def __init__(self, slots: Mapping[str, int | None], scaling: ScalingConfig) -> None:
        self.lost: dict[str, str] = {}
        """By host, what was seen of its end."""
        self._slots = {name: math.inf if most is None else most for name, most in slots.items()}
        self._most = min(scaling.max_workers, self._room(self._slots))
        self._least = min(scaling.min_workers, self._most)
        self._facts: dict[str, HostInfo] = {}
        self._asked: dict[str, float] = {}
        self._try_at: dict[str, float] = {}
        self._last_try: dict[str, str] = {}
        self._until = -math.inf
        self._patient_until = math.inf

    def begin(self, now: float, *, wait_s: float, patience_s: float) -> None:
        """An attempt is to be staffed. wait_s: how long to try lost hosts again while there are too few slots without
        them; each is tried once in any case. patience_s: how long to wait for hosts that the run can do without.
        """
        self._until = now + wait_s
        self._patient_until = now + patience_s
        self._try_at = dict.fromkeys(self.lost, now)

    # -- hosts come and go ----------------------------------------------------------------------------------------

    @property
    def present(self) -> list[HostInfo]:
        return [self._facts[name] for name in self._slots if name in self._facts]

    def came(self, host: str, facts: HostInfo) -> None:
        """Its agent has said HELLO."""
        self._facts[host] = facts
        for about in (self.lost, self._asked, self._last_try):
            about.pop(host, None)

    def went(self, host: str, why: str, now: float) -> None:
        """It was lost, or could not be reached."""
        self._facts.pop(host, None)
        was_asked = self._asked.pop(host, None) is not None
        self._try_at[host] = now + RECONNECT_INTERVAL_S * was_asked
        if host in self.lost:
            self._last_try[host] = why
        self.lost.setdefault(host, why)

    def is_gone(self, host: str) -> bool:
        """Whether it is known to be lost, and nobody has asked it since."""
        return host in self.lost and host not in self._asked

    def told(self, hosts: Iterable[str] | None = None) -> str:
        """What was seen of the lost hosts, or of those of ``hosts`` that were lost, a line each."""
        told = [host for host in self.lost if hosts is None or host in hosts]
        return "\n".join(f"{host}: {self.lost[host]}{self._told_of_last_try(host)}" for host in told)

    def _told_of_last_try(self, host: str) -> str:
        return f"\n    tried again: {self._last_try[host]}" if host in self._last_try else ""

    # -- staffing -------------------------------------------------------------------------------------------------

    def ask(self, now: float) -> list[str]:
        """The hosts to be asked now. Those that have not answered for too long are given up before."""
        for host, since in list(self._asked.items()):
            if now >= since + CONNECT_TIMEOUT_S:
                self.went(host, f"no answer within {CONNECT_TIMEOUT_S:g} s", now)
        chosen = []
        for host in sorted(self._slots, key=self.lost.__contains__):
            if self._room([*self._facts, *self._asked]) >= self._most:
                break
            if self._may_be_asked(host) and self._try_at.get(host, now) <= now:
                self._asked[host] = now
                chosen.append(host)
        return chosen

    def standing(self, now: float) -> Readiness:
        """Who was asked is waited for, so that the order of placement is not that of the answers."""
        room = self._room(self._facts)
        if room >= self._least and (not self._asked or now >= self._patient_until):
            return Readiness.READY
        hopeful = [*self._asked, *filter(self._may_be_asked, self._slots)]
        return Readiness.WAITING if room + self._room(hopeful) >= self._least else Readiness.HOPELESS

    def deadline(self) -> float:
        """When to ask again, while waiting."""
        moments = [since + CONNECT_TIMEOUT_S for since in self._asked.values()]
        if self._room([*self._facts, *self._asked]) < self._most:
            moments += [self._try_at[host] for host in self.lost if self._may_be_asked(host)]
        if self._room(self._facts) >= self._least:
            moments.append(self._patient_until)
        return min(moments, default=math.inf)

    def _may_be_asked(self, host: str) -> bool:
        if host in self._facts or host in self._asked:
            return False
        return host not in self.lost or self._try_at[host] <= self._until

    def _room(self, hosts: Iterable[str]) -> float:
        return sum(self._slots[host] for host in hosts)

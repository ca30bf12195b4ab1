"""The hosts of a run: which are connected, which were lost, and which to connect for an attempt. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections import Counter, OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from distrain.hosts.host import HostInfo, chosen_interface
from distrain.system.text import name_hosts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from distrain import wire
    from distrain.api.config import ScalingConfig
    from distrain.hosts.host import HostSettings

HOST_ANSWER_TIMEOUT_S = 60.0
"""Seconds to wait for the HELLO of a new agent, and for its ports, before its host counts as lost."""
SLOW_HOST_S = 10.0
"""Seconds after which a host that has not answered may be replaced by a spare one. Equals ssh's connect timeout."""
FIRST_PROGRESS_S = 5.0
"""Seconds to wait for hosts before a line names those that have not answered. The time doubles with every line."""
RECONNECT_INTERVAL_S = 2.0
"""Seconds to wait after a failed connection to a lost host before the next one."""
FIRST_AT_ONCE = 10
"""Number of connections that are opened at once at first. A sshd may refuse more that have not logged in."""
MOST_AT_ONCE = 128
"""Number of connections that are opened at once when many hosts have answered: each needs CPU time of this machine."""

_MOST_LOSSES_SHOWN = 20
_MOST_TRIES = 6
"""The number of refusals by sshd after which a host counts as lost."""


def info_of(name: str, hello: wire.Hello, settings: HostSettings) -> HostInfo:
    """Return what is known about a host after its HELLO."""
    info, interface = HostInfo.of(hello.host), chosen_interface(settings.interface, hello.interfaces)
    own_address = "" if settings.is_local else info.address  # a local agent sees the user's own ssh connection
    address = hello.interfaces[interface] if interface else own_address
    return replace(info, name=name, slots=settings.slots, address=address, interface=interface)


class Readiness(enum.Enum):
    """Readiness of the hosts for an attempt."""

    READY = "ready"
    WAITING = "waiting"  # hosts may still answer
    HOPELESS = "hopeless"  # too few slots, even if every host answers


class HostPool:
    """The hosts of a run.

    slots: how many ranks each host takes (None: any number), in the order of placement.

    While the connected hosts have too few slots for all workers, the pool connects further hosts: first the spare hosts
    that were not needed before, then those that were lost. A host that is slow to answer counts as missing for this.
    A run of ``(min, max)`` workers may start with ``min`` once every contacted host has answered or was given up.

    No method looks at all hosts, except those that are called once in an attempt.
    """

    def __init__(self, slots: Mapping[str, int | None], scaling: ScalingConfig) -> None:
        self.losses: dict[str, str] = {}
        """The lost hosts, and why each was lost."""
        most = scaling.max_workers
        self._slots = {name: most if slots is None else min(slots, most) for name, slots in slots.items()}
        self._position = {name: position for position, name in enumerate(slots)}
        self.most_workers = min(most, sum(self._slots.values()))
        """The number of workers if every host answers."""
        self._least = min(scaling.min_workers, self.most_workers)
        self._connected: dict[str, HostInfo] = {}
        self._prompt: OrderedDict[str, float] = OrderedDict()
        """The hosts whose agents are starting, and since when, in this order; without those that are slow."""
        self._slow: OrderedDict[str, float] = OrderedDict()
        """The slow hosts, likewise. Only an OrderedDict finds its first item quickly after many were removed."""
        self._connect_at: dict[str, float] = {}
        """The hosts that may be connected, and from when on."""
        self._queue: list[tuple[float, int, str]] = []
        """A heap of these moments, with the position and the name of the host. Outdated if not in ``_connect_at``."""
        self._connected_slots = self._prompt_slots = self._slow_slots = self._possible_slots = 0
        before = itertools.accumulate(self._slots.values(), initial=0)
        self._needed = sum(slots < self.most_workers for slots in before)
        """The number of hosts that have slots for all workers."""
        self._at_once = FIRST_AT_ONCE
        self._turned_away: Counter[str] = Counter()
        """The number of refusals by sshd, for each host that has not answered."""
        self._later: set[str] = set()
        """The hosts that were turned away and will be contacted again."""
        self._later_failure: dict[str, str] = {}
        """By lost host: a line that says why it could not be connected again."""
        self._reconnect_until = -math.inf
        self._wait_until = math.inf
        self._progress_due = math.inf
        self._progress_interval_s = FIRST_PROGRESS_S
        for name in slots:
            self._allow(name, -math.inf)

    def begin_search(self, now: float, *, reconnect_s: float, wait_s: float) -> None:
        """Begin to look for hosts for an attempt.

        reconnect_s: how long to reconnect lost hosts again and again while there are too few slots without them. Each
            lost host is tried at least once.
        wait_s: how long to wait for hosts that the run can do without.
        """
        self._reconnect_until = now + reconnect_s
        self._wait_until = now + wait_s
        self._progress_interval_s = FIRST_PROGRESS_S
        self._progress_due = now + FIRST_PROGRESS_S
        for host in self.losses:
            if not self._is_contacted(host):
                self._turned_away.pop(host, None)
                self._forbid(host)
                self._allow(host, now)

    def hosts_to_retry(self, now: float) -> list[str]:
        """Choose hosts to connect, as :meth:`hosts_to_connect` does, while an attempt trains with too few of them."""
        for host in self.losses:
            if not (self._is_contacted(host) or host in self._connect_at):
                self._turned_away.pop(host, None)
                self._allow(host, now)
        return self.hosts_to_connect(now)

    # -- connected and lost hosts ---------------------------------------------------------------------------------

    @property
    def connected(self) -> list[HostInfo]:
        """The hosts whose agents have sent HELLO, in the order of placement."""
        return [self._connected[name] for name in sorted(self._connected, key=self._position.__getitem__)]

    @property
    def slow(self) -> Collection[str]:
        """The hosts that have not answered for so long that spare ones may replace them."""
        return self._slow.keys()

    def mark_connected(self, host: str, info: HostInfo) -> None:
        """Note the HELLO of a host."""
        self._end_contact(host)
        self._forbid(host)
        self._at_once = min(self._at_once + 1, MOST_AT_ONCE)
        self._connected_slots += 0 if host in self._connected else self._slots[host]
        self._connected[host] = info
        for noted in (self.losses, self._later_failure, self._turned_away):
            noted.pop(host, None)

    def mark_lost(self, host: str, why: str, now: float) -> None:
        """Note that a host was lost, or could not be connected."""
        if self._connected.pop(host, None) is not None:
            self._connected_slots -= self._slots[host]
        retry_at = now + RECONNECT_INTERVAL_S * self._end_contact(host)
        self._forbid(host)
        if retry_at <= self._reconnect_until:
            self._allow(host, retry_at)
        if host in self.losses:
            self._later_failure[host] = f"\n    tried again: {why}"
        self.losses.setdefault(host, why)

    def may_try_later(self, host: str, now: float) -> bool:
        """Open fewer connections at once, as sshd has turned a host away, and connect this one later.

        Return False if the host was turned away too often.
        """
        self._turned_away[host] += 1
        if self._turned_away[host] >= _MOST_TRIES or not self._end_contact(host):
            return False
        self._at_once = max(1, len(self._prompt) // 2)
        self._allow(host, now + RECONNECT_INTERVAL_S)
        self._later.add(host)
        return True

    def is_lost(self, host: str) -> bool:
        """Return True if the host was lost and is not being reconnected."""
        return host in self.losses and not self._is_contacted(host)

    def describe_losses(self, hosts: Collection[str] | None = None) -> str:
        """Return a line for each lost host (of ``hosts``, if given) that says why it was lost."""
        chosen = self.losses if hosts is None else set(hosts)
        lost = [host for host in self.losses if host in chosen]
        shown, others = lost[:_MOST_LOSSES_SHOWN], lost[_MOST_LOSSES_SHOWN:]
        lines = [f"{host}: {self.losses[host]}{self._later_failure.get(host, '')}" for host in shown]
        return "\n".join([*lines, *([f"and {len(others):,} other hosts: {name_hosts(others)}"] if others else [])])

    # -- the search -----------------------------------------------------------------------------------------------

    def hosts_to_connect(self, now: float) -> list[str]:
        """Choose the hosts to connect now, and note that they are contacted.

        Hosts that were contacted too long ago, and have not answered, count as lost.
        """
        self._look_at_clock(now)
        chosen = []
        while self._wants_more and self._next_moment() <= now:
            host = self._queue[0][2]
            self._forbid(host)
            self._prompt[host] = now
            self._prompt_slots += self._slots[host]
            chosen.append(host)
        return chosen

    def readiness(self, now: float) -> Readiness:
        """Return whether an attempt can start.

        It waits for every contacted host, so that placement does not depend on which host answers first. If there are
        slots for all workers, it does not wait for slow hosts.
        """
        slots = self._connected_slots
        awaited = len(self._prompt)
        if slots < self.most_workers:
            awaited += len(self._slow) + len(self._later)
        if slots >= self._least and (not awaited or now >= self._wait_until):
            return Readiness.READY
        possible = slots + self._prompt_slots + self._slow_slots + self._possible_slots
        return Readiness.WAITING if possible >= self._least else Readiness.HOPELESS

    def deadline(self) -> float:
        """Return when one of the methods may have a new answer if no host answers before."""
        moments = [_first(self._prompt) + SLOW_HOST_S, _first(self._slow) + HOST_ANSWER_TIMEOUT_S]
        if self._prompt or self._slow:
            moments.append(self._progress_due)
        if self._wants_more:
            moments.append(self._next_moment())
        if self._connected_slots >= self._least:
            moments.append(self._wait_until)
        return min(moments)

    def describe_progress(self, now: float) -> str:
        """Return how many of the contacted hosts have answered, and which have not, more and more rarely; else, ""."""
        if now < self._progress_due:
            return ""
        self._progress_interval_s *= 2
        self._progress_due = now + self._progress_interval_s
        answered, awaited = len(self._connected), [*self._slow, *self._prompt]
        count = f"{answered:,} of {max(self._needed, answered + len(awaited)):,} hosts"
        return f"{count} have answered; waiting for {name_hosts(awaited)}" if awaited else ""

    @property
    def _wants_more(self) -> bool:
        """True if further hosts should be contacted: those that have answered, or will soon, have too few slots."""
        return self._connected_slots + self._prompt_slots < self.most_workers and len(self._prompt) < self._at_once

    def _is_contacted(self, host: str) -> bool:
        return host in self._prompt or host in self._slow

    def _next_moment(self) -> float:
        """Return from when on the next host may be connected; infinity if there is none."""
        while self._queue and self._connect_at.get(self._queue[0][2]) != self._queue[0][0]:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else math.inf

    def _allow(self, host: str, moment: float) -> None:
        self._connect_at[host] = moment
        self._possible_slots += self._slots[host]
        heapq.heappush(self._queue, (moment, self._position[host], host))

    def _forbid(self, host: str) -> None:
        if self._connect_at.pop(host, None) is not None:
            self._possible_slots -= self._slots[host]
            self._later.discard(host)

    def _end_contact(self, host: str) -> bool:
        """Stop waiting for a host. Return False if nobody did."""
        if self._prompt.pop(host, None) is not None:
            self._prompt_slots -= self._slots[host]
        elif self._slow.pop(host, None) is not None:
            self._slow_slots -= self._slots[host]
        else:
            return False
        return True

    def _look_at_clock(self, now: float) -> None:
        """Note which contacted hosts are slow by now, and which are lost."""
        while _first(self._prompt) + SLOW_HOST_S <= now:
            host, since = self._prompt.popitem(last=False)
            self._slow[host] = since
            self._prompt_slots -= self._slots[host]
            self._slow_slots += self._slots[host]
        while _first(self._slow) + HOST_ANSWER_TIMEOUT_S <= now:
            self.mark_lost(next(iter(self._slow)), f"no answer within {HOST_ANSWER_TIMEOUT_S:g} s", now)


def _first(contacts: Mapping[str, float]) -> float:
    return next(iter(contacts.values()), math.inf)

"""Tests of hosts whose ranks are slow, while the run trains; a spare host may replace a slow one. Runs in: coordinator.

All ranks are measured in their next report(), so each is about as busy as the others. A host is slow if that shows in
the test. The checkpoint that is committed next is the one at which another host takes its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain import wire
from distrain.api.observer import AttemptBegan, BecameSlow, Committed, HostIsSlow
from distrain.decisions.events import HostSlow
from distrain.decisions.fitness.rates import RULES, slow_result
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.api.config import FailureConfig
    from distrain.api.observer import Fact
    from distrain.coordinator.observers import Observers
    from distrain.decisions.fitness.rates import Slow

_LEAST_RANKS, _LEAST_HOSTS = 3, 2
"""With fewer, nobody can tell who is slow."""


class SniffTests:
    """Have all ranks measure their hosts when one has become slow. Each host is judged once in an attempt.

    send: sends a message to a rank. spares_for: returns the hosts that would take the place of one. replace: has them
    do so.
    """

    hears = (AttemptBegan, BecameSlow, Committed)

    def __init__(
        self,
        config: FailureConfig,
        observers: Observers,
        *,
        send: Callable[[wire.SniffTest], None],
        spares_for: Callable[[str], Sequence[str]],
        replace: Callable[[HostSlow], None],
    ) -> None:
        self._replaces = config.on_slow == "replace"
        self._observers = observers
        self._status = observers.status
        self._send = send
        self._spares_for = spares_for
        self._replace = replace
        self._begin(-1)
        observers.add(self)

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._suspects: dict[str, BecameSlow] = {}
        """By host that was not judged yet: its slowest rank."""
        self._judged: set[str] = set()
        self._asked: set[int] = set()
        self._answers: dict[int, wire.Sniffed] = {}
        self._slow: HostSlow | None = None
        """The host to replace at the next checkpoint."""

    def hear(self, fact: Fact) -> None:
        """Hear a fact."""
        match fact:
            case AttemptBegan():
                self._begin(fact.attempt)
            case BecameSlow() if not (self._status.is_stopping or self._status.is_debugged):
                self._suspect(fact)
            case Committed():
                if 2 * len(self._answers) > len(self._asked):  # the others may never call report()
                    self._judge()
                if self._slow:
                    self._replace(self._slow)

    def _suspect(self, slow: BecameSlow) -> None:
        ranks = self._status.ranks
        if len(ranks) < _LEAST_RANKS or self._status.hosts < _LEAST_HOSTS or slow.host in self._judged:
            return
        is_under_way = bool(self._suspects)
        self._suspects.setdefault(slow.host, slow)
        if not is_under_way:
            self._answers.clear()
            self._asked = {rank for rank, state in enumerate(ranks) if not state.ended}
            for rank in self._asked:
                self._send(wire.SniffTest(attempt=self._attempt, rank=rank))

    def handle(self, answer: wire.Sniffed) -> None:
        """Take the answer of a rank."""
        self._answers[answer.rank] = answer
        if self._answers.keys() >= self._asked:
            self._judge()

    def _judge(self) -> None:
        """Judge the suspects that have answered."""
        hosts = [state.host for state in self._status.ranks]
        for host, suspect in list(self._suspects.items()):
            if suspect.rank in self._answers:
                del self._suspects[host]
                self._judged.add(host)
                own = self._answers[suspect.rank]
                others = [answer for rank, answer in self._answers.items() if hosts[rank] != host]
                if (slow := find_slow(own, others)) is not None:
                    self._on_confirmed(suspect, slow)
                elif own.results and any(answer.model == own.model for answer in others):
                    warn(describe_own_work(suspect, own, self._status.name))

    def _on_confirmed(self, suspect: BecameSlow, slow: Slow) -> None:
        host = suspect.host
        self._observers.tell(HostIsSlow(host, str(slow)))
        has_spare = bool(self._spares_for(host))
        if self._replaces and has_spare:
            self._slow = HostSlow(host, str(slow))
            return
        advice = "there is no spare host; " * self._replaces + slow.rule.cure
        if has_spare:
            advice = 'FailureConfig(on_slow="replace") puts a spare host in its place'
        warn(f"{host} is slow: {slow}; it costs the run {lost_minutes(suspect):.0f} min per hour; {advice}")


def find_slow(own: wire.Sniffed, others: Sequence[wire.Sniffed]) -> Slow | None:
    """Return the first slow result of a rank, compared with ranks on other hosts with the same GPU; or None."""
    same = [other.results for other in others if other.model == own.model]
    found = (
        slow_result(name, value, [results[name] for results in same if name in results], [])
        for name, value in own.results.items()
    )
    return next(filter(None, found), None)


def describe_own_work(suspect: BecameSlow, own: wire.Sniffed, run: str) -> str:
    """Return a line about a slow rank whose host is not slow."""
    good = " and ".join(RULES[name].name for name in own.results)
    where = suspect.place or f"its lines with `distrain profile {run} -r {suspect.rank}`"
    return (
        f"rank {suspect.rank} on {suspect.host} is slow, but its {good} are as fast as those of the others: look at "
        f"{where}"
    )


def lost_minutes(slow: BecameSlow) -> float:
    """Return the minutes of each hour that a slow rank costs the others.

    While it works, the median rank works for 1 / factor of the time, and waits for it for the rest.
    """
    return 60 * (1 - 1 / slow.factor)

"""Tests of hosts whose ranks are slow, while the run trains; a spare host may replace a slow one. Runs in: coordinator.

All ranks measure their hosts in their next report(), where they are about equally busy. A host is slow if that shows in
the results. At the checkpoint that is committed next, another host takes its place.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from distrain import wire
from distrain.api.observer import AttemptBegan, BecameSlow, Committed, TroubleBegan
from distrain.decisions.events import HostSlow
from distrain.decisions.fitness.rates import RULES, slow_results
from distrain.decisions.hearing import hears as hears_messages
from distrain.hosts.troubles import Trouble
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.api.observer import Fact
    from distrain.coordinator.observers import Observers
    from distrain.decisions.fitness.rates import Slow


@dataclass(slots=True, eq=False)
class SniffTests:
    """Judge the hosts of slow ranks, each host once in an attempt.

    replaces: True to replace slow hosts. send: sends a message to a rank. spares_for: returns the hosts that would take
    the place of one. replace: lets them take it.
    """

    replaces: bool
    observers: Observers
    send: Callable[[wire.SniffTest], None]
    spares_for: Callable[[str], Sequence[str]]
    replace: Callable[[HostSlow], None]
    hears: ClassVar = (AttemptBegan, BecameSlow, Committed)
    _attempt: int = -1
    _suspects: dict[str, BecameSlow | None] = field(default_factory=dict)
    """By host: its slowest rank; None once the host was judged."""
    _answers: dict[int, wire.Sniffed] = field(default_factory=dict)
    _asked: int = 0
    """How many ranks were asked for the answers."""
    _slow: HostSlow | None = None
    """The host to replace at the next checkpoint."""

    def hear(self, fact: Fact) -> None:
        """Hear a fact."""
        status = self.observers.status
        match fact:
            case AttemptBegan():
                self._attempt, self._suspects, self._answers, self._slow = fact.attempt, {}, {}, None
            case BecameSlow() if not (status.is_stopping or status.is_debugged):
                if len(status.ranks) > 2 and status.hosts > 1 and fact.host not in self._suspects:  # else who is slow?
                    self._suspect(fact)
            case Committed():
                if any(self._suspects.values()) and 2 * len(self._answers) > self._asked:
                    self._judge()  # the other ranks may never call report()
                if self._slow:
                    self.replace(self._slow)

    def _suspect(self, slow: BecameSlow) -> None:
        """Have all ranks measured, unless that is under way."""
        is_under_way = any(self._suspects.values())
        self._suspects[slow.host] = slow
        if not is_under_way:
            self._answers.clear()
            ranks = [rank for rank, state in enumerate(self.observers.status.ranks) if not state.ended]
            self._asked = len(ranks)
            for rank in ranks:
                self.send(wire.SniffTest(attempt=self._attempt, rank=rank))

    @hears_messages(wire.Sniffed)
    def handle(self, _: str, answer: wire.Sniffed) -> None:
        """Take the answer of a rank."""
        self._answers[answer.rank] = answer
        if len(self._answers) == self._asked:
            self._judge()

    def _judge(self) -> None:
        """Judge the hosts of the suspects that have answered, compared with one rank of each other host."""
        hosts = [state.host for state in self.observers.status.ranks]
        suspects = {host: one for host, one in self._suspects.items() if one is not None and one.rank in self._answers}
        answers = {hosts[rank]: answer for rank, answer in self._answers.items()}
        answers |= {host: self._answers[one.rank] for host, one in suspects.items()}
        models = {host: answer.model for host, answer in answers.items()}
        slow = slow_results({host: answer.results for host, answer in answers.items()}, models, ())
        for host, suspect in suspects.items():
            self._suspects[host] = None
            if host in slow:
                self._on_confirmed(suspect, slow[host][0])
            elif answers[host].results and Counter(models.values())[models[host]] > 1:
                good = ", ".join(RULES[name].name for name in answers[host].results)
                where = suspect.place or f"`distrain profile {self.observers.status.name} -r {suspect.rank}`"
                who = f"rank {suspect.rank} on {host} is slow"
                warn(f"{who}, but its host is as fast as the others ({good}): look at {where}")

    def _on_confirmed(self, suspect: BecameSlow, slow: Slow) -> None:
        host, has_spare = suspect.host, bool(self.spares_for(suspect.host))
        # While the slow rank works, the median rank works for 1 / factor of the time, and waits for it for the rest.
        minutes = 60 * (1 - 1 / suspect.factor)
        text = f"{host} is slow: {slow.text}; it costs the run {minutes:.0f} min per hour"
        self.observers.tell(TroubleBegan(host, Trouble(rank=suspect.rank, kind="host", problem="slow", text=text)))
        advice = 'FailureConfig(on_slow="replace") puts a spare host in its place'
        if has_spare and self.replaces:
            self._slow = HostSlow(host, slow.text)
        else:
            warn(f"{text}; {advice if has_spare else f'there is no spare host; {RULES[slow.name].cure}'}")

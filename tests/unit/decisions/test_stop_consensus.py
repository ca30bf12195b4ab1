"""At which call of should_stop() all ranks stop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from distrain import wire
from distrain.decisions.run.stop_consensus import StopConsensus


def test_the_decision_stays() -> None:
    made = StopConsensus(0)
    assert made.vote(0, 0, 0.0) == []
    assert made.request_stop() == [wire.StopDecision(attempt=0, rank=0, call=0)]
    assert made.vote(0, 5, 0.0) == [wire.StopDecision(attempt=0, rank=0, call=5, final=True)]
    assert made.vote(1, 0, 0.0) == [wire.StopDecision(attempt=0, rank=1, call=0)]
    assert made.vote(1, 1, 9.0) == [wire.StopDecision(attempt=0, rank=1, call=5, final=True)]
    assert made.tick(100.0) == []


@dataclass
class Rank:
    """A loop of a collective of all, then should_stop()."""

    call: int = 0
    sent_on: float = math.inf
    stop_at: int | None = None
    waits: bool = False
    stopped: bool = False
    mail: list[Any] = field(default_factory=list)


@given(st.data())
def test_ranks_in_lockstep_always_stop_at_the_same_call(data: Any) -> None:
    """Whoever is faster, and whenever the request comes: nobody is left in a collective."""
    world = data.draw(st.integers(1, 4))
    made, ranks, now = StopConsensus(0), [Rank() for _ in range(world)], 0.0
    ask_after = data.draw(st.integers(0, 12))
    asked = False

    def can_move(rank: Rank) -> bool:
        """In a collective until everybody has come to it; in a vote until there is an answer."""
        if rank.stopped:
            return False
        if rank.waits:
            return bool(rank.mail)
        return all(
            other.call > rank.call or (other.call == rank.call and not other.waits and not other.stopped)
            for other in ranks
        )

    def carry_out(orders: list[wire.StopDecision]) -> None:
        for order in orders:
            ranks[order.rank].mail.append(order)

    def read(rank: Rank) -> None:
        for letter in rank.mail:
            if letter.final:
                rank.stop_at = letter.call
            else:
                rank.sent_on = letter.call
        rank.mail.clear()

    for step in range(2000):
        if step >= ask_after and not asked and len(made.callers) == world:
            asked = True
            carry_out(made.request_stop())
        movers = [number for number, rank in enumerate(ranks) if can_move(rank)]
        if not movers:
            if all(rank.stopped for rank in ranks):
                break
            assert made.deadline < math.inf, "everybody waits"
            now = made.deadline
            carry_out(made.tick(now))
            continue
        number = data.draw(st.sampled_from(movers)) if step < 100 else movers[0]
        rank = ranks[number]
        if not rank.waits:
            rank.call += 1
            if rank.call == 1:
                carry_out(made.vote(number, 0, now))
        read(rank)
        rank.stopped = rank.stop_at is not None and rank.call >= rank.stop_at
        rank.waits = rank.stop_at is None and rank.call >= rank.sent_on
        if rank.waits:
            carry_out(made.vote(number, rank.call, now))
    assert all(rank.stopped for rank in ranks)
    assert len({rank.call for rank in ranks}) == 1

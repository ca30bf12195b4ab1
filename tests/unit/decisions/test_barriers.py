"""Ranks that meet in collectives: who goes on with what, who is told why not, and when somebody is late."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrain import wire
from distrain.decisions.barriers import BarrierTracker

BARRIER = "barrier()"
BROADCAST = "broadcast_from_rank_zero()"


def join(
    collectives: BarrierTracker,
    rank: int,
    index: int = 1,
    operation: str = BARRIER,
    data: bytes = b"",
    now: float = 0.0,
    **how: Any,
) -> list[wire.CollectiveDone]:
    asked = wire.CollectiveEntered(attempt=0, rank=rank, index=index, operation=operation, body=data, **how)
    return collectives.entered(asked, now)


def done(rank: int, index: int, data: bytes) -> wire.CollectiveDone:
    return wire.CollectiveDone(attempt=0, rank=rank, index=index, body=data)


def refusals(answers: list[wire.CollectiveDone]) -> dict[int, str]:
    """By rank; nobody may go on."""
    assert all(answer.refused is not None and answer.body == b"" for answer in answers)
    return {answer.rank: str(answer.refused) for answer in answers}


# -- everybody comes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_collective_that_gathers_brings_the_data_of_all_in_their_order(order: tuple[int, ...]) -> None:
    collectives = BarrierTracker(0, 3)
    answers = [join(collectives, rank, 1, "gather", b"of %d" % rank, gathers=True) for rank in order]
    assert answers == [[], [], [done(rank, 1, b"of 0\nof 1\nof 2") for rank in range(3)]]


# -- different operations --------------------------------------------------------------------------------------------


def test_ranks_that_mix_up_operations_all_hear_who_called_what() -> None:
    collectives = BarrierTracker(0, 4)
    for rank in (0, 1, 3):
        join(collectives, rank, operation=BARRIER)
    reasons = refusals(join(collectives, 2, operation=BROADCAST))
    assert sorted(reasons) == [0, 1, 2, 3]
    assert "ranks 0, 1, 3 called barrier(), rank 2 called broadcast_from_rank_zero()" in reasons[0]
    assert "call number 1" in reasons[0]


@pytest.mark.parametrize("operation", [BARRIER, BROADCAST])
def test_who_comes_late_to_a_mix_up_does_not_pair_with_the_next_call_of_the_others(operation: str) -> None:
    """They have caught the error and go on: their second call must wait for the latecomer's second."""
    collectives = BarrierTracker(0, 3)
    join(collectives, 0, 1, BARRIER)
    join(collectives, 1, 1, BROADCAST)
    assert join(collectives, 0, 2, BARRIER) == join(collectives, 1, 2, BARRIER) == []
    late = join(collectives, 2, 1, operation)
    assert [(answer.rank, answer.index, answer.refused is None) for answer in late] == [(2, 1, False)]
    assert [answer.refused for answer in join(collectives, 2, 2, BARRIER)] == [None] * 3


GAVE_UP = "rank 0 gave up waiting in barrier(), call number 1, and continued"


def test_a_rank_that_an_exception_took_out_is_named_and_all_meet_in_the_next_call() -> None:
    collectives = BarrierTracker(0, 3)
    join(collectives, 0, 1, timeout_s=5.0)
    assert join(collectives, 0, 2, BROADCAST) == []
    assert collectives.deadline() is None
    for rank in (1, 2):
        assert refusals(join(collectives, rank, 1)) == {rank: GAVE_UP}
    assert join(collectives, 1, 2, BROADCAST) == []
    assert [answer.refused for answer in join(collectives, 2, 2, BROADCAST)] == [None] * 3


# -- ranks that have finished ----------------------------------------------------------------------------------------


def test_a_rank_that_finishes_fails_those_who_wait_for_it() -> None:
    collectives = BarrierTracker(0, 4)
    for rank in (1, 2, 3):
        join(collectives, rank, operation=BROADCAST)
    reasons = refusals(collectives.finished(0))
    assert sorted(reasons) == [1, 2, 3]
    assert "rank 0 finished train_func without calling broadcast_from_rank_zero()" in reasons[1]
    assert "ranks 1-3 have waited" in reasons[1]


# -- ranks that are late ---------------------------------------------------------------------------------------------


def test_who_has_waited_for_its_timeout_hears_for_whom() -> None:
    collectives = BarrierTracker(0, 4)
    join(collectives, 2, now=10.0, timeout_s=5.0)
    join(collectives, 0, now=12.0, timeout_s=5.0)
    assert collectives.deadline() == 15.0
    assert collectives.tick(14.9) == []
    told = refusals(collectives.tick(15.0))
    assert told == dict.fromkeys((0, 2), "ranks 1, 3 have not come to barrier() within 5 s")
    assert refusals(join(collectives, 1, now=16.0, timeout_s=5.0)) == {1: told[0]}, "the same for who comes later"
    assert collectives.deadline() is None


# -- any order -------------------------------------------------------------------------------------------------------


@dataclass
class Oracle:
    """What a rank still has to do, and what it has heard."""

    operations: list[str]
    heard: list[wire.CollectiveDone] = field(default_factory=list)
    waits: bool = False
    finished: bool = False

    @property
    def called(self) -> int:
        return len(self.heard) + self.waits


programs = st.lists(st.sampled_from((BARRIER, BROADCAST)), max_size=4)


@settings(max_examples=200)
@given(
    one=programs, world_size=st.integers(1, 4), others=st.lists(programs, min_size=3, max_size=3), same=st.booleans(),
    data=st.data(),
)  # fmt: skip
def test_in_any_order_calls_pair_by_number_and_nobody_waits_for_ever(
    one: list[str], world_size: int, others: list[list[str]], same: bool, data: st.DataObject
) -> None:
    """Every rank makes its calls whatever it hears, and finishes."""
    ranks = [Oracle(list(one)), *(Oracle(list(one if same else other)) for other in others[: world_size - 1])]
    collectives = BarrierTracker(0, world_size)
    while able := [rank for rank, oracle in enumerate(ranks) if not (oracle.waits or oracle.finished)]:
        rank = data.draw(st.sampled_from(able))
        me = ranks[rank]
        if me.called < len(me.operations):
            me.waits = True
            operation = me.operations[len(me.heard)]
            answers = join(collectives, rank, me.called, operation, f"{rank}:{me.called}".encode())
        else:
            me.finished = True
            answers = collectives.finished(rank)
        for answer in answers:
            assert ranks[answer.rank].waits
            ranks[answer.rank].waits = False
            ranks[answer.rank].heard.append(answer)
            assert answer.index == len(ranks[answer.rank].heard)
    assert all(oracle.finished for oracle in ranks), "somebody waits for ever"
    for index in range(max(len(oracle.heard) for oracle in ranks)):
        heard = [oracle.heard[index] if index < len(oracle.heard) else None for oracle in ranks]
        called = {oracle.operations[index] if index < len(oracle.operations) else None for oracle in ranks}
        if len(called) == 1:
            assert heard == [done(rank, index + 1, f"0:{index + 1}".encode()) for rank in range(world_size)]
        else:
            assert all(answer is None or answer.refused for answer in heard)

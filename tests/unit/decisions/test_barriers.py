"""Ranks that meet in collectives: who goes on with what, who is told why not, and when somebody is late."""

from __future__ import annotations

import math
from typing import Any

import pytest

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
) -> list[wire.Answer]:
    asked = wire.CollectiveEntered(
        attempt=0, rank=rank, question=index, index=index, operation=operation, body=data, **how
    )
    return collectives.entered(asked, now)


def done(rank: int, index: int, data: bytes) -> wire.Answer:
    return wire.Answer(attempt=0, rank=rank, question=index, body=data)


def refusals(answers: list[wire.Answer]) -> dict[int, str]:
    """By rank; nobody may go on."""
    assert all(answer.failed is not None and answer.body == b"" for answer in answers)
    return {answer.rank: str(answer.failed) for answer in answers}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_collective_that_gathers_brings_the_data_of_all_in_their_order(order: tuple[int, ...]) -> None:
    collectives = BarrierTracker(3)
    answers = [join(collectives, rank, 1, "gather", b"of %d" % rank, gathers=True) for rank in order]
    assert answers == [[], [], [done(rank, 1, b"of 0\nof 1\nof 2") for rank in range(3)]]


# -- different operations --------------------------------------------------------------------------------------------


def test_ranks_that_mix_up_operations_all_hear_who_called_what() -> None:
    collectives = BarrierTracker(4)
    for rank in (0, 1, 3):
        join(collectives, rank, operation=BARRIER)
    reasons = refusals(join(collectives, 2, operation=BROADCAST))
    assert sorted(reasons) == [0, 1, 2, 3]
    assert "ranks 0, 1, 3 called barrier(), rank 2 called broadcast_from_rank_zero()" in reasons[0]
    assert "call number 1" in reasons[0]


GAVE_UP = "rank 0 gave up waiting in barrier(), call number 1, and continued"


def test_a_rank_that_an_exception_took_out_is_named_and_all_meet_in_the_next_call() -> None:
    collectives = BarrierTracker(3)
    join(collectives, 0, 1, timeout_s=5.0)
    assert join(collectives, 0, 2, BROADCAST) == []
    assert collectives.deadline == math.inf
    for rank in (1, 2):
        assert refusals(join(collectives, rank, 1)) == {rank: GAVE_UP}
    assert join(collectives, 1, 2, BROADCAST) == []
    assert [answer.failed for answer in join(collectives, 2, 2, BROADCAST)] == [None] * 3


# -- ranks that have finished ----------------------------------------------------------------------------------------


def test_a_rank_that_finishes_fails_those_who_wait_for_it() -> None:
    collectives = BarrierTracker(4)
    for rank in (1, 2, 3):
        join(collectives, rank, operation=BROADCAST)
    reasons = refusals(collectives.finished(0))
    assert sorted(reasons) == [1, 2, 3]
    assert "rank 0 finished train_func without calling broadcast_from_rank_zero()" in reasons[1]
    assert "ranks 1-3 have waited" in reasons[1]


# -- ranks that are late ---------------------------------------------------------------------------------------------


def test_who_has_waited_for_its_timeout_hears_for_whom() -> None:
    collectives = BarrierTracker(4)
    join(collectives, 2, now=10.0, timeout_s=5.0)
    join(collectives, 0, now=12.0, timeout_s=5.0)
    assert collectives.deadline == 15.0
    assert collectives.tick(14.9) == []
    told = refusals(collectives.tick(15.0))
    assert told == dict.fromkeys((0, 2), "ranks 1, 3 have not come to barrier() within 5 s")
    assert refusals(join(collectives, 1, now=16.0, timeout_s=5.0)) == {1: told[0]}, "the same for who comes later"
    assert collectives.deadline == math.inf

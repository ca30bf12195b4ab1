"""The n-th reports of all ranks, in rows."""

from __future__ import annotations

import math
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from distrain.decisions.report_rows import ROW_TIMEOUT_S, ReportsJoined, RowAssembly

# -- rows ------------------------------------------------------------------------------------------------------------


def report(
    rows: RowAssembly, rank: int, index: int, *, has_checkpoint: bool = False, now: float = 0.0
) -> list[list[int | None]]:
    return plain(rows.reported(rank, index, {"n": 10 * index + rank}, now, has_checkpoint=has_checkpoint))


def plain(complete: list[ReportsJoined]) -> list[list[int | None]]:
    return [[None if metrics is None else metrics["n"] for metrics in row.metrics] for row in complete]


# -- ranks that never report -----------------------------------------------------------------------------------------


def test_a_silent_rank_is_waited_for_and_then_given_up() -> None:
    rows = RowAssembly(3)
    assert rows.deadline() == math.inf
    assert report(rows, 0, 1, now=100.0) == []
    assert report(rows, 0, 2, now=101.0) == []
    assert report(rows, 1, 1, now=101.0) == []
    assert rows.deadline() == 100.0 + ROW_TIMEOUT_S
    assert rows.tick(100.0 + ROW_TIMEOUT_S / 2) == []
    assert plain(rows.tick(100.0 + ROW_TIMEOUT_S)) == [[10, 11, None]]
    assert report(rows, 1, 2, now=200.0) == [[20, 21, None]]
    assert rows.deadline() == math.inf


# -- ranks that have finished ----------------------------------------------------------------------------------------


def test_rows_stay_in_order_behind_one_that_waits_for_its_checkpoint() -> None:
    rows = RowAssembly(1)
    assert report(rows, 0, 1, has_checkpoint=True) == []
    assert report(rows, 0, 2) == []
    complete = rows.settled(1, "/checkpoint")
    assert plain(complete) == [[10], [20]]
    assert [row.checkpoint for row in complete] == ["/checkpoint", None]


def test_the_time_for_a_report_is_independent_of_the_number_of_ranks() -> None:
    """If each report looked at all ranks, this would take half a minute."""
    world_size, complete = 10_000, 0
    rows = RowAssembly(world_size)
    began = time.process_time()
    for index in range(1, 6):
        for rank in range(world_size):
            complete += len(report(rows, rank, index))
            rows.deadline()
    assert complete == 5
    assert time.process_time() - began < 10


@given(st.data())
def test_every_report_of_ranks_that_all_report_comes_out_once_and_in_order(data: Any) -> None:
    """Whatever the order in which they arrive, if nobody is silent for too long."""
    world, reports = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    rows = RowAssembly(world)
    done = dict.fromkeys(range(world), 0)
    complete: list[list[int | None]] = []
    while behind := [rank for rank, count in done.items() if count < reports]:
        rank = data.draw(st.sampled_from(behind))
        done[rank] += 1
        complete += report(rows, rank, done[rank])
    assert rows.deadline() == math.inf
    assert complete == [[10 * index + rank for rank in range(world)] for index in range(1, reports + 1)]
    assert rows.end() == []

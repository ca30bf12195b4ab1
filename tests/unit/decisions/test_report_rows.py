"""The n-th reports of all ranks, in rows."""

from __future__ import annotations

import math
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from distrain.decisions.report_rows import ROW_TIMEOUT_S, ReportCounts, ReportsJoined, RowAssembly


def test_the_fewest_reports_are_those_of_the_slowest_rank_that_is_waited_for() -> None:
    counts = ReportCounts(3)
    assert counts.fewest == 0
    counts.set(0, 5)
    counts.set(1, 3)
    assert (counts.fewest, counts.ranks_with(0)) == (0, {2})
    counts.remove(2)
    counts.remove(2)
    assert (counts.fewest, 2 in counts) == (3, False)
    counts.set(2, 1)
    assert (counts.fewest, counts.ranks_with(3)) == (1, {1})
    for rank in range(3):
        counts.remove(rank)
    assert counts.fewest == math.inf


# -- rows ------------------------------------------------------------------------------------------------------------


def report(
    rows: RowAssembly, rank: int, index: int, *, has_checkpoint: bool = False, now: float = 0.0
) -> list[list[int | None]]:
    return plain(rows.reported(rank, index, {"n": 10 * index + rank}, now, has_checkpoint=has_checkpoint))


def plain(complete: list[ReportsJoined]) -> list[list[int | None]]:
    return [[None if metrics is None else metrics["n"] for metrics in row.metrics] for row in complete]


def test_a_row_is_complete_when_every_rank_has_reported() -> None:
    rows = RowAssembly(3)
    assert report(rows, 1, 1) == []
    assert report(rows, 0, 1) == []
    assert report(rows, 2, 1) == [[10, 11, 12]]


def test_a_row_that_has_failed_everywhere_is_left_out() -> None:
    rows = RowAssembly(2)
    assert [rows.reported(rank, 1, None, 0.0, has_checkpoint=False) for rank in range(2)] == [[], []]
    assert rows.reported(0, 2, None, 0.0, has_checkpoint=False) == []
    assert report(rows, 1, 2) == [[None, 21]]


def test_one_rank_alone() -> None:
    rows = RowAssembly(1)
    assert [report(rows, 0, n) for n in (1, 2, 3)] == [[[10]], [[20]], [[30]]]


def test_whoever_is_ahead_waits_for_those_who_have_reported_before() -> None:
    rows = RowAssembly(2)
    assert report(rows, 0, 1) == []
    assert report(rows, 1, 1) == [[10, 11]]
    assert [report(rows, 0, n) for n in (2, 3, 4)] == [[], [], []]
    assert report(rows, 1, 2) == [[20, 21]]
    assert plain(rows.finished(1)) == [[30, None], [40, None]]


# -- ranks that never report -----------------------------------------------------------------------------------------


def test_a_silent_rank_is_waited_for_and_then_given_up() -> None:
    rows = RowAssembly(3)
    assert rows.deadline() is None
    assert report(rows, 0, 1, now=100.0) == []
    assert report(rows, 0, 2, now=101.0) == []
    assert report(rows, 1, 1, now=101.0) == []
    assert rows.deadline() == 100.0 + ROW_TIMEOUT_S
    assert rows.tick(100.0 + ROW_TIMEOUT_S / 2) == []
    assert plain(rows.tick(100.0 + ROW_TIMEOUT_S)) == [[10, 11, None]]
    assert report(rows, 1, 2, now=200.0) == [[20, 21, None]]
    assert rows.deadline() is None


def test_a_silent_rank_that_begins_to_report_is_waited_for_again() -> None:
    rows = RowAssembly(2)
    report(rows, 0, 1, now=0.0)
    assert plain(rows.tick(ROW_TIMEOUT_S)) == [[10, None]]
    assert report(rows, 1, 1, now=50.0) == []
    assert report(rows, 0, 2, now=51.0) == []
    assert rows.deadline() is None
    assert report(rows, 1, 2, now=99.0) == [[20, 21]]


def test_who_has_reported_once_is_waited_for_whatever_the_time() -> None:
    rows = RowAssembly(2)
    report(rows, 0, 1)
    assert report(rows, 1, 1) == [[10, 11]]
    assert report(rows, 0, 2) == []
    assert rows.deadline() is None
    assert rows.tick(1e9) == []


def test_a_silent_rank_that_finishes_needs_no_more_time() -> None:
    rows = RowAssembly(2)
    assert report(rows, 0, 1) == []
    assert plain(rows.finished(1)) == [[10, None]]
    assert rows.deadline() is None


def test_a_row_without_silent_ranks_still_waits_for_its_checkpoint() -> None:
    rows = RowAssembly(2)
    assert report(rows, 0, 1, has_checkpoint=True) == []
    assert rows.tick(ROW_TIMEOUT_S) == []
    (row,) = rows.settled(1, "/checkpoint")
    assert row.metrics == [{"n": 10}, None]


# -- ranks that have finished ----------------------------------------------------------------------------------------


def test_a_rank_that_has_finished_is_not_waited_for() -> None:
    rows = RowAssembly(2)
    assert plain(rows.finished(1)) == []
    assert report(rows, 0, 1) == [[10, None]]


def test_the_end_completes_what_there_is() -> None:
    rows = RowAssembly(2)
    report(rows, 0, 1)
    report(rows, 1, 1)
    report(rows, 0, 2)
    report(rows, 0, 3)
    assert plain(rows.end()) == [[20, None], [30, None]]
    assert rows.end() == []


def test_a_row_waits_for_its_checkpoint() -> None:
    rows = RowAssembly(2)
    assert report(rows, 0, 1, has_checkpoint=True) == []
    assert report(rows, 1, 1, has_checkpoint=True) == []
    (row,) = rows.settled(1, "/checkpoint")
    assert row.checkpoint == "/checkpoint"
    assert plain([row]) == [[10, 11]]


def test_a_checkpoint_may_be_committed_before_the_row_is_complete() -> None:
    rows = RowAssembly(2)
    assert report(rows, 0, 1, has_checkpoint=True) == []
    assert rows.settled(1, "/checkpoint") == []
    (row,) = rows.reported(1, 1, {"n": 11}, 0.0, has_checkpoint=False)
    assert row.checkpoint == "/checkpoint"


def test_rows_stay_in_order_behind_one_that_waits_for_its_checkpoint() -> None:
    rows = RowAssembly(1)
    assert report(rows, 0, 1, has_checkpoint=True) == []
    assert report(rows, 0, 2) == []
    complete = rows.settled(1, "/checkpoint")
    assert plain(complete) == [[10], [20]]
    assert [row.checkpoint for row in complete] == ["/checkpoint", None]


def test_a_checkpoint_that_will_not_be_is_none() -> None:
    rows = RowAssembly(1)
    assert report(rows, 0, 1, has_checkpoint=True) == []
    (row,) = rows.settled(1, None)
    assert row.checkpoint is None


def test_the_end_gives_up_checkpoints_that_are_not_committed() -> None:
    rows = RowAssembly(2)
    report(rows, 0, 1, has_checkpoint=True)
    report(rows, 1, 1, has_checkpoint=True)
    (row,) = rows.end()
    assert (row.metrics, row.checkpoint) == ([{"n": 10}, {"n": 11}], None)


def test_a_rank_that_reports_too_late_changes_nothing_and_is_not_kept() -> None:
    rows = RowAssembly(2)
    report(rows, 0, 1)
    assert plain(rows.finished(1)) == [[10, None]]
    assert report(rows, 1, 1) == []
    assert rows.end() == []
    assert not rows._rows


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
    assert rows.deadline() is None
    assert complete == [[10 * index + rank for rank in range(world)] for index in range(1, reports + 1)]
    assert rows.end() == []

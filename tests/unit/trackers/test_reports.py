"""Which reports are new to a tracker, and their steps, without any file."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.api.tracker import Report
from distrain.trackers.reports import Progress, first_steps, new_report

Marks = dict[int, tuple[int, int]]


def record(index: int, *, attempt: int = 0, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"time": 1.0, "attempt": attempt, "rank": rank, "index": index, "metrics": {"loss": 0.5}, **more}


def steps(records: list[dict[str, Any]], firsts: dict[int, int | None], marks: Marks | None = None) -> list[int]:
    known: Marks = {} if marks is None else marks
    found = [new_report(one, firsts[one["attempt"]], known) for one in records]
    return [report.step for report in found if report is not None]


def test_a_report_that_a_restart_repeats_is_not_new() -> None:
    before = [record(index) for index in range(1, 9)]
    after = [record(index, attempt=1) for index in range(1, 8)]
    assert steps(before + after, {0: 0, 1: 5}) == list(range(1, 13))


def test_each_rank_has_steps_of_its_own() -> None:
    marks: Marks = {}
    assert steps([record(1), record(1, rank=1), record(2, rank=1), record(2)], {0: 0}, marks) == [1, 1, 2, 2]
    assert marks == {0: (2, 2), 1: (2, 2)}


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), min_size=1, max_size=6))
def test_whatever_the_restarts_every_step_comes_once_and_in_order(attempts: list[tuple[int, int]]) -> None:
    """Each attempt starts at some step that the run has reached, and makes some reports."""
    reached, lines, firsts = 0, [], {}
    for attempt, (back, count) in enumerate(attempts):
        firsts[attempt] = max(0, reached - back) if attempt else 0
        lines += [record(index, attempt=attempt) for index in range(1, count + 1)]
        reached = max(reached, firsts[attempt] + count)
    assert steps(lines, firsts) == list(range(1, reached + 1))
    marks: Marks = {}
    half = len(lines) // 2
    again = steps(lines[:half], firsts, marks) + steps(lines, firsts, marks)  # all lines are read once more
    assert again == list(range(1, reached + 1))


def test_progress_is_the_step_if_it_is_a_whole_number() -> None:
    lines = [record(1, progress=[100, 500]), record(2, progress=[200.0, 500]), record(3, progress=[200.5, 500])]
    assert steps(lines, {0: 0}) == [100, 200, 201]


def test_steps_never_decrease_even_if_progress_begins_again_with_each_epoch() -> None:
    lines = [record(epoch * 3 + batch, progress=[batch, 3]) for epoch in range(2) for batch in (1, 2, 3)]
    assert steps(lines, {0: 0}) == [1, 2, 3, 4, 5, 6]


def test_two_reports_may_have_the_same_progress() -> None:
    assert steps([record(1, progress=[5, 9]), record(2, progress=[5, 9])], {0: 0}) == [5, 5]


ATTEMPT = {"attempt": 0, "training": 5.0, "ended": 9.0, "first_step": 0}


@pytest.mark.parametrize(
    ("second", "is_over", "expected"),
    [
        ({"training": 20.0, "first_step": 7}, False, {0: 0, 1: 7}),
        ({"training": None, "first_step": 0, "ended": None}, False, {0: 0}),
        ({"training": None, "first_step": 7, "ended": 30.0}, False, {0: 0, 1: 7}),
        ({"training": None, "first_step": 0, "ended": None}, True, {0: 0, 1: None}),
    ],
)
def test_the_first_step_of_an_attempt_is_known_once_its_ranks_train(
    second: dict[str, Any], is_over: bool, expected: dict[int, int | None]
) -> None:
    assert first_steps([ATTEMPT, {"attempt": 1, **second}], is_over=is_over) == expected


def test_the_first_attempt_begins_with_step_0_even_if_fit_was_killed() -> None:
    assert first_steps([{**ATTEMPT, "training": None, "ended": None}], is_over=True) == {0: 0}


def test_reports_of_an_attempt_with_an_unknown_first_step_are_passed_over() -> None:
    assert steps([record(1), record(1, attempt=1), record(1, attempt=2)], {0: 0, 1: None, 2: 1}) == [1, 2]


def test_a_report_has_its_numbers_flattened() -> None:
    metrics = {"loss": math.nan, "eval": {"acc": 1, "best": True}, "note": "text", "list": [1, 2], "huge": 10**400}
    [found] = [new_report(record(1, metrics=metrics), 0, {})]
    assert found is not None
    assert math.isnan(found.metrics.pop("loss"))
    assert found == Report(rank=0, step=1, time=1.0, attempt=0, metrics={"eval/acc": 1.0, "eval/best": 1.0})


def test_the_progress_survives_json() -> None:
    progress = Progress(10, 20, {0: (5, 500), 3: (4, 4)})
    assert Progress.from_json(json.loads(json.dumps(progress.as_json()))) == progress

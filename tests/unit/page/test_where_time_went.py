"""The use of a run's time: parts that add up to its wall time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.page.time_use import AttemptTimes, where_time_went

if TYPE_CHECKING:
    from collections.abc import Sequence


def parts_of(*attempts: AttemptTimes, hangs: Sequence[tuple[float, float]] = ()) -> dict[str, float]:
    parts = where_time_went(attempts, hangs, started=0.0, ended=100.0)
    return {kind: round(seconds, 6) for kind, seconds in parts.items() if seconds}


def test_a_plain_run_starts_trains_and_ends() -> None:
    assert parts_of(AttemptTimes(started=2, training=10, ended=98)) == {"training": 88, "starting": 12}


def test_work_after_the_checkpoint_of_the_next_attempt_is_repeated() -> None:
    first = AttemptTimes(started=0, training=5, ended=40, kept_until=30)
    second = AttemptTimes(started=50, training=55, ended=100)
    assert parts_of(first, second) == {"training": 70, "repeated": 10, "starting": 10, "between": 10}


def test_a_hang_counts_as_such_even_if_its_work_was_repeated() -> None:
    first = AttemptTimes(started=0, training=0, ended=50, kept_until=20)
    second = AttemptTimes(started=50, training=50, ended=100)
    parts = parts_of(first, second, hangs=[(15, 18), (29, 50)])
    assert parts == {"training": 67, "hung": 24, "repeated": 9}


times = st.floats(0, 1000)
attempts = st.builds(
    AttemptTimes,
    started=times,
    training=st.none() | times,
    ended=times,
    kept_until=st.none() | times,
    waits=st.tuples(times, times),
)
hangs = st.lists(st.tuples(times, times), max_size=3)


@given(st.lists(attempts, max_size=4), hangs, times, times)
def test_the_parts_add_up_whatever_the_files_say(
    found: list[AttemptTimes], hung: list[tuple[float, float]], started: float, ended: float
) -> None:
    started, ended = sorted((started, ended))
    parts = where_time_went(found, hung, started=started, ended=ended)
    assert sum(parts.values()) == pytest.approx(ended - started, abs=1e-6)
    assert min(parts.values()) >= -1e-9

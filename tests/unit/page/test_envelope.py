"""Curves in bounded memory keep their extremes and what is no number."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from distrain.page.envelope import Envelope


def envelope_of(values: list[float], *, most: int = 128) -> Envelope:
    envelope = Envelope(most)
    for step, value in enumerate(values):
        envelope.add(step, value)
    return envelope


def test_peaks_of_one_step_survive() -> None:
    values = [math.sin(n / 1000) for n in range(100_000)]
    values[12_345], values[98_765] = 50.0, -50.0
    points = envelope_of(values).points(100)
    assert {(12_345, 50.0), (98_765, -50.0)} <= set(points)
    assert len(points) <= 100
    assert points == sorted(points)


def test_nan_and_infinity_are_marked_and_leave_the_other_points_alone() -> None:
    envelope = envelope_of([1.0, math.nan, 2.0, math.inf, -math.inf, 3.0])
    assert envelope.marks == [(1, "nan"), (3, "inf"), (4, "-inf")]
    assert envelope.points(100) == [(0, 1.0), (2, 2.0), (5, 3.0)]
    assert (envelope.count, envelope.nonfinite) == (6, 3)


def test_numbers_beyond_the_floats_are_infinite() -> None:
    assert envelope_of([1, 10**400, -(10**400)]).marks == [(1, "inf"), (2, "-inf")]


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=300), st.integers(2, 40))
def test_every_point_is_real_and_the_extremes_are_there(values: list[float], most: int) -> None:
    envelope = envelope_of(values, most=16)
    points = envelope.points(most)
    assert all(values[step] == value for step, value in points)
    assert {min(values), max(values)} <= {value for _, value in points}
    assert envelope.lowest is not None
    assert envelope.highest is not None
    assert (envelope.lowest[1], envelope.highest[1]) == (min(values), max(values))
    assert envelope.first == (0, values[0])
    assert envelope.last == (len(values) - 1, values[-1])

"""The order of rows is a permutation, and the ranks divide it without losing or repeating a row."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distrain.data.order import Division, Permutation, Span, length, part, rows_left


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 3000), key=st.integers())
def test_a_permutation_has_every_number_once(size: int, key: int) -> None:
    assert sorted(Permutation(size, key)(np.arange(size))) == list(range(size))


def test_the_orders_of_three_rows_are_equally_frequent() -> None:
    counts = Counter(tuple(Permutation(3, key)(np.arange(3)).tolist()) for key in range(6000))
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())


def test_places_of_a_billion_rows_are_computed_one_by_one() -> None:
    found = Permutation(10**9, 1, "rows")(np.arange(10**9 - 1000, 10**9))
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < 10**9


def test_an_order_does_not_change_between_versions() -> None:
    """A checkpoint of an older version would otherwise resume with other rows."""
    assert Permutation(10, 1, 2, "rows")(np.arange(10)).tolist() == [7, 0, 1, 5, 8, 9, 4, 2, 6, 3]


def rows_of(spans: list[Span]) -> list[int]:
    return [row for start, stop in spans for row in range(start, stop)]


@settings(max_examples=300, deadline=None)
@given(rows=st.integers(0, 60), data=st.data())
def test_what_the_ranks_have_taken_and_what_is_left_are_all_rows_once(rows: int, data: st.DataObject) -> None:
    divisions: list[Division] = []
    seen: list[int] = []
    for _ in range(data.draw(st.integers(1, 4))):
        left = rows_left(rows, divisions)
        ranks = data.draw(st.integers(1, 5))
        share = length(left) // ranks
        taken = [data.draw(st.integers(0, share)) for _ in range(ranks)]
        for rank in range(ranks):
            own = rows_of([*part(left, rank * share, (rank + 1) * share)])
            assert len(own) == share
            seen += own[: taken[rank]]
        divisions.append(Division(ranks, share, taken))
    assert sorted(seen + rows_of(rows_left(rows, divisions))) == list(range(rows))

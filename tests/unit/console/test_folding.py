"""Equal lines of several ranks become one; the lines of each rank stay complete and in order."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from distrain.console.folding import WAIT_S, Folding


def taken(folding: Folding, now: float) -> list[tuple[list[int], bytes]]:
    return [(sorted(line.ranks), line.text) for line in folding.take(now)]


def test_a_line_waits_a_moment_for_other_ranks() -> None:
    folding = Folding(3)
    folding.add(0, 1, b"a", now=10.0)
    folding.add(2, 1, b"a", now=10.1)
    assert taken(folding, 10.15) == []
    assert folding.deadline() == 10.0 + WAIT_S
    assert taken(folding, 10.0 + WAIT_S) == [([0, 2], b"a")]
    assert folding.deadline() is None


def test_lines_of_the_same_key_are_folded_and_the_first_is_shown() -> None:
    folding = Folding(2)
    folding.add(0, 2, b"100% 5.1 it/s", now=10.0, key=b"% it/s")
    folding.add(1, 2, b"100% 5.2 it/s", now=10.0, key=b"% it/s")
    assert taken(folding, 11.0) == [([0, 1], b"100% 5.1 it/s")]


TEXTS = st.sampled_from([b"", b"a", b"b", b"c"])


@given(
    printed=st.lists(st.tuples(st.integers(0, 3), TEXTS, st.floats(0, 0.3))),
    takes=st.sets(st.integers(0, 40)),
)
def test_each_rank_has_all_its_lines_in_order(printed: list[tuple[int, bytes, float]], takes: set[int]) -> None:
    folding, now = Folding(4), 0.0
    shown: dict[int, list[bytes]] = {rank: [] for rank in range(4)}
    for number, (rank, text, pause_s) in enumerate(printed):
        now += pause_s
        folding.add(rank, 1, text, now)
        for line in folding.take(now) if number in takes else ():
            for its in line.ranks:
                shown[its].append(line.text)
    for line in folding.take(math.inf):
        for its in line.ranks:
            shown[its].append(line.text)
    assert shown == {rank: [text for who, text, _ in printed if who == rank] for rank in range(4)}


@given(lines=st.lists(TEXTS, max_size=12), data=st.data())
def test_equal_output_of_all_ranks_is_shown_once(lines: list[bytes], data: st.DataObject) -> None:
    """Whatever the order in which the ranks print it, and however often lines are taken meanwhile."""
    folding, shown = Folding(3), []
    printed = [0, 0, 0]
    for rank in data.draw(st.permutations([0, 1, 2] * len(lines))):
        folding.add(rank, 1, lines[printed[rank]], now=0.0)
        printed[rank] += 1
        shown += taken(folding, 0.0)
    assert shown == [([0, 1, 2], line) for line in lines]

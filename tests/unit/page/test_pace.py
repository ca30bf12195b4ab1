"""The pace of the ranks reveals a slow one, among few and among many."""

from __future__ import annotations

import pytest

from distrain.page.clock import Clock
from distrain.page.pace import MOST_ROWS, SLOTS, Pace, level, rows, slow_ranks


def pace_of(times: dict[int, list[float]], *, length: float = 96.0, block: int = 50) -> Pace:
    pace = Pace([length * slot / SLOTS for slot in range(SLOTS + 1)])
    for rank, reported in times.items():
        for start in range(0, len(reported), block):
            pace.extend(0, rank, reported[start : start + block])
    return pace


def every(interval: float, *, until: float = 96.0) -> list[float]:
    return [n * interval for n in range(int(until / interval) + 1)]


def test_a_slow_rank_stands_out_in_each_slot() -> None:
    pace = pace_of({rank: every(0.3 if rank == 2 else 0.1) for rank in range(8)})
    slowest = slow_ranks(pace.ratios())
    assert slowest[0].rank == 2
    assert slowest[0].ratio == pytest.approx(3, rel=0.05)
    assert all(rank.ratio == pytest.approx(1, rel=0.05) for rank in slowest[1:])


def test_a_rank_that_is_slow_for_a_while_is_red_only_then() -> None:
    slow = [t for t in every(0.1) if not 40 < t < 60 or round(t * 10) % 5 == 0]
    ratios = pace_of({0: every(0.1), 1: every(0.1), 2: slow}).ratios()
    levels = [level(ratio) for ratio in ratios[2] if ratio is not None]
    assert set(levels[42:58]) == {5}
    assert set(levels[:39] + levels[62:]) == {1}


def test_an_interval_longer_than_a_slot_counts_in_all_that_it_covers() -> None:
    ratios = pace_of({0: every(0.5), 1: every(0.5), 2: every(12.0)}).ratios()
    assert ratios[2] == pytest.approx([24.0] * SLOTS, rel=0.01)


def test_many_ranks_share_rows_which_show_the_slowest() -> None:
    ratios = pace_of({rank: every(1.0 if rank == 777 else 0.5) for rank in range(1000)}).ratios()
    drawn = rows(ratios)
    assert len(drawn) <= MOST_ROWS
    red = [row for row in drawn if any(cell and cell > 1.5 for cell in row.cells)]
    assert [row.ranks[0] <= 777 <= row.ranks[1] for row in red] == [True]


def test_the_time_between_two_attempts_is_no_interval() -> None:
    pace = Pace([float(slot) for slot in range(SLOTS + 1)])
    pace.extend(0, 0, [1.0, 2.0])
    pace.extend(1, 0, [50.0, 51.0])
    assert pace.ratios()[0][30] is None


def test_reports_outside_the_known_times_do_no_harm() -> None:
    assert pace_of({0: [-5.0, -1.0, 500.0, 1000.0], 1: [3.0]}).ratios()[0][50] == 1


def test_long_pauses_between_attempts_are_drawn_shorter() -> None:
    clock = Clock([(0, 100), (10_100, 10_200)])
    assert clock.pauses == [(100, 10_100)]
    assert clock.position(10_100) - clock.position(100) < 0.1
    for time in (0, 50, 100, 5000, 10_150, 10_200):
        assert clock.time(clock.position(time)) == pytest.approx(time)
    assert (clock.position(-1), clock.position(99_999)) == (0, 1)
    assert Clock([]).position(5) == 1

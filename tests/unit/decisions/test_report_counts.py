"""How many reports each rank has made."""

from __future__ import annotations

import math

from distrain.decisions.report_counts import ReportCounts


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

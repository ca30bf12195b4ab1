"""The pace of all ranks: their report intervals over time, and which ranks are slow. Pure. Runs in: anywhere."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOTS = 96
MOST_ROWS = 240
LEVELS = (0.8, 1.25, 1.5, 2.0, 4.0)
"""Bounds of the colours, as parts of the median."""
USUAL = 1
"""The level between the first two bounds."""


@dataclass(slots=True)
class _Rank:
    attempt: int
    time: float
    seconds: array[float] = field(default_factory=lambda: array("d", bytes(8 * SLOTS)))
    """For each slot, the part of it that lies between two reports of an attempt, in seconds."""
    intervals: array[float] = field(default_factory=lambda: array("d", bytes(8 * SLOTS)))
    """For each slot, how many intervals lie in it. One in several slots counts a part in each."""


@dataclass(frozen=True, slots=True)
class Row:
    """The slots of one rank, or of neighbouring ranks: the slowest of them.

    cells: report intervals as multiples of the slot's median; None without reports.
    """

    ranks: tuple[int, int]
    cells: list[float | None]


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank's report intervals as multiples of the median of all ranks: their mean over the slots, and the largest."""

    rank: int
    ratio: float
    worst: float


class Pace:
    """The report intervals of each rank.

    bounds: the times at which slots begin, and the end of the last one.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._ranks: dict[int, _Rank] = {}

    def extend(self, attempt: int, rank: int, times: Sequence[float]) -> None:
        """Add the times of reports. Those of a rank come in order."""
        seen = self._ranks.get(rank)
        if seen is None:
            seen = self._ranks[rank] = _Rank(attempt, times[0])
        elif seen.attempt == attempt:
            self._spread(seen, seen.time, times[0])
        start, last = 0, len(times) - 1
        while start < last:
            slot = self._slot(times[start])
            end = bisect_left(times, self._bounds[slot + 1], start + 1) - 1 if slot < SLOTS - 1 else last
            seen.seconds[slot] += max(0.0, times[end] - times[start])
            seen.intervals[slot] += end - start
            if end < last:
                self._spread(seen, times[end], times[end + 1])
            start = end + 1
        seen.attempt, seen.time = attempt, times[last]

    def _slot(self, time: float) -> int:
        return min(max(bisect_right(self._bounds, time) - 1, 0), SLOTS - 1)

    def _spread(self, seen: _Rank, begin: float, end: float) -> None:
        """Divide an interval among the slots that it covers."""
        first, last = self._slot(begin), self._slot(end)
        for slot in range(first, last + 1):
            since = begin if slot == first else self._bounds[slot]
            until = end if slot == last else self._bounds[slot + 1]
            seen.seconds[slot] += max(0.0, until - since)
            seen.intervals[slot] += max(0.0, until - since) / (end - begin) if end > begin else 1

    @property
    def ranks(self) -> int:
        """The number of ranks that have reported."""
        return len(self._ranks)

    def ratios(self) -> dict[int, list[float | None]]:
        """Return for each rank and slot the mean report interval as a multiple of the median of all ranks."""
        means = {rank: _means(self._ranks[rank]) for rank in sorted(self._ranks)}
        medians = [median(there) if (there := [m for m in slot if m is not None]) else 0.0 for slot in _slots(means)]
        return {
            rank: [m / middle if m is not None and middle else None for m, middle in zip(row, medians, strict=True)]
            for rank, row in means.items()
        }


def _means(rank: _Rank) -> list[float | None]:
    return [s / n if n > 0 else None for s, n in zip(rank.seconds, rank.intervals, strict=True)]


def _slots(means: dict[int, list[float | None]]) -> list[tuple[float | None, ...]]:
    return list(zip(*means.values(), strict=True))


def rows(ratios: dict[int, list[float | None]], most: int = MOST_ROWS) -> list[Row]:
    """Return at most ``most`` rows. A row of several ranks shows the slowest of them in each slot."""
    ranks = list(ratios)
    together = -(-len(ranks) // most) or 1
    found = []
    for start in range(0, len(ranks), together):
        group = ranks[start : start + together]
        slots = zip(*(ratios[rank] for rank in group), strict=True)
        found.append(
            Row((group[0], group[-1]), [max((r for r in slot if r is not None), default=None) for slot in slots])
        )
    return found


def slow_ranks(ratios: dict[int, list[float | None]]) -> list[SlowRank]:
    """Return all ranks, the slowest first: by the mean ratio over the slots in which others reported, too.

    The mean shows a rank that is slow for a part of the run.
    """
    found = []
    shared = [sum(ratio is not None for ratio in slot) > 1 for slot in zip(*ratios.values(), strict=True)]
    for rank, row in ratios.items():
        known = [ratio for ratio, is_shared in zip(row, shared, strict=True) if ratio is not None and is_shared]
        if known:
            found.append(SlowRank(rank, sum(known) / len(known), max(known)))
    return sorted(found, key=lambda slow: -slow.ratio)


def level(ratio: float) -> int:
    """Return the colour of a ratio: 0 is faster than usual, :data:`USUAL` is usual, larger ones are slower."""
    return sum(ratio >= bound for bound in LEVELS)

"""A curve of any length in bounded memory, whose extremes and non-finite values are kept. Pure. Runs in: anywhere.

Neighbouring points share a bin. A bin keeps the lowest and the highest of them: real points, at their own steps. When
there are too many bins, two become one. So what is drawn goes through every peak, however many points there are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Point = tuple[int, float]
_Bin = tuple[Point, Point]
"""The lowest and the highest point."""

MOST_BINS = 1024
_MOST_MARKS = 200


class Envelope:
    """The points of one curve, added in the order of their steps.

    Attributes: ``count`` of all values, ``nonfinite`` the number of those that are not finite, ``marks``: the first of
    these, each with its step, as ``nan``, ``inf`` or ``-inf``; ``first``, ``last``: finite points, None if there is
    none.
    """

    def __init__(self, most_bins: int = MOST_BINS) -> None:
        self.count = 0
        self.nonfinite = 0
        self.marks: list[tuple[int, str]] = []
        self.first: Point | None = None
        self.last: Point | None = None
        self._most_bins = most_bins
        self._bins: list[_Bin] = []
        self._width, self._filled = 1, 0

    def add(self, step: int, value: float) -> None:
        """Add the next point."""
        self.count += 1
        point = step, value
        try:
            is_finite = math.isfinite(value)
        except OverflowError:  # an integer beyond the floats
            is_finite, value = False, math.inf if value > 0 else -math.inf
        if not is_finite:
            self.nonfinite += 1
            if len(self.marks) < _MOST_MARKS:
                self.marks.append((step, str(value)))
            return
        self.first, self.last = self.first or point, point
        if self._filled:
            self._bins[-1] = _join(self._bins[-1], (point, point))
        else:
            if len(self._bins) >= self._most_bins:
                self._bins, self._width = _merged(self._bins), self._width * 2
            self._bins.append((point, point))
        self._filled = (self._filled + 1) % self._width

    def points(self, most: int) -> list[Point]:
        """Return at most about ``most`` points, in the order of their steps."""
        bins = self._bins
        while len(bins) > max(1, most // 2):
            bins = _merged(bins)
        return sorted({point for both in bins for point in both})

    @property
    def lowest(self) -> Point | None:
        """The first of the lowest points."""
        return min((low for low, _ in self._bins), key=lambda point: point[1], default=None)

    @property
    def highest(self) -> Point | None:
        """The first of the highest points."""
        return max((high for _, high in self._bins), key=lambda point: point[1], default=None)


def _join(first: _Bin, second: _Bin) -> _Bin:
    low = second[0] if second[0][1] < first[0][1] else first[0]
    high = second[1] if second[1][1] > first[1][1] else first[1]
    return low, high


def _merged(bins: Sequence[_Bin]) -> list[_Bin]:
    """Return half as many bins. An odd last one stays alone."""
    pairs = [_join(bins[n], bins[n + 1]) for n in range(0, len(bins) - 1, 2)]
    return [*pairs, bins[-1]] if len(bins) % 2 else pairs

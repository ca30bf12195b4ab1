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

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add points, at least one."""
        self.count += len(values)
        try:
            if all(map(math.isfinite, (sum(values), min(values), max(values)))):
                self._add_finite(steps, values)
                return
        except OverflowError:  # an integer beyond the floats
            pass
        pairs = [(step, _as_float(value)) for step, value in zip(steps, values, strict=True)]
        others = [(step, str(value)) for step, value in pairs if not math.isfinite(value)]
        self.nonfinite += len(others)
        self.marks += others[: _MOST_MARKS - len(self.marks)]
        finite = [(step, value) for step, value in pairs if math.isfinite(value)]
        self._add_finite([step for step, _ in finite], [value for _, value in finite])

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

    def _add_finite(self, steps: Sequence[int], values: Sequence[float]) -> None:
        if not values:
            return
        self.first = self.first or (steps[0], values[0])
        self.last = steps[-1], values[-1]
        start = 0
        while start < len(values):
            if self._filled == 0 and len(self._bins) >= self._most_bins:
                self._bins, self._width = _merged(self._bins), self._width * 2
            end = start + self._width - self._filled
            part = values[start:end]
            low, high = min(part), max(part)
            new = (steps[start + part.index(low)], low), (steps[start + part.index(high)], high)
            if self._filled:
                self._bins[-1] = _join(self._bins[-1], new)
            else:
                self._bins.append(new)
            self._filled = (self._filled + len(part)) % self._width
            start = end


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _join(first: _Bin, second: _Bin) -> _Bin:
    low = second[0] if second[0][1] < first[0][1] else first[0]
    high = second[1] if second[1][1] > first[1][1] else first[1]
    return low, high


def _merged(bins: Sequence[_Bin]) -> list[_Bin]:
    """Return half as many bins. An odd last one stays alone."""
    pairs = [_join(bins[n], bins[n + 1]) for n in range(0, len(bins) - 1, 2)]
    return [*pairs, bins[-1]] if len(bins) % 2 else pairs

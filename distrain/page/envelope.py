"""A curve of any length in bounded memory, whose extremes and non-finite values are kept. Pure. Runs in: anywhere.

When there are too many points, only the lowest and the highest one of each span of steps are kept: real points, at
their own steps. So what is drawn goes through every peak, however many points there are.
"""

from __future__ import annotations

import math
from itertools import groupby
from operator import itemgetter
from typing import Any

Point = tuple[int, float]

MOST_POINTS = 2048
_MOST_MARKS = 200
_value = itemgetter(1)


class Envelope:
    """The points of one curve, added in the order of their steps.

    Attributes: ``count`` of all values, ``nonfinite`` the number of those that are not finite, ``marks``: the first of
    these, each with its step, as ``nan``, ``inf`` or ``-inf``; ``first``, ``last``: finite points, None if there is
    none.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self.count = 0
        self.nonfinite = 0
        self.marks: list[tuple[int, str]] = []
        self.first: Point | None = None
        self.last: Point | None = None
        self._most = most
        self._points: list[Point] = []

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
        self._points.append(point)
        if len(self._points) > self._most:
            self._points = self.points(self._most // 2)

    def points(self, most: int) -> list[Point]:
        """Return at most so many points, in the order of their steps."""
        points = sorted(self._points)
        if len(points) <= most:
            return points
        first, spans = points[0][0], max(1, most // 2)
        width = (points[-1][0] - first + 1) / spans
        groups = [list(group) for _, group in groupby(points, lambda point: (point[0] - first) // width)]
        return sorted({end(group, key=_value) for group in groups for end in (min, max)})

    def drawn(self, most: int) -> dict[str, Any]:
        """Return what the scripts draw: at most so many points, and the others of interest, as step and value."""
        points = self.points(most)
        return {
            "x": [step for step, _ in points],
            "y": [float(f"{value:.6g}") for _, value in points],
            "low": self.lowest,
            "high": self.highest,
            **{name: getattr(self, name) for name in ("count", "nonfinite", "marks", "first", "last")},
        }

    @property
    def lowest(self) -> Point | None:
        """The first of the lowest points."""
        return min(self._points, key=_value, default=None)

    @property
    def highest(self) -> Point | None:
        """The first of the highest points."""
        return max(self._points, key=_value, default=None)

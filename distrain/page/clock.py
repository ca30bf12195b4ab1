"""The time axis of a run: attempts to scale, and long pauses between them shortened. Pure. Runs in: anywhere."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST_PAUSE = 0.08
"""A pause between attempts takes at most this part of the time in attempts."""


class Clock:
    """Positions between 0 and 1 for times, by the spans of the attempts in order, ``(start, end)``.

    Attributes: ``pauses``: those that are shortened, ``(start, end)``.

    >>> clock = Clock([(0, 10), (1010, 1020)])
    >>> round(clock.position(10), 2), round(clock.position(1010), 2), clock.pauses
    (0.46, 0.54, [(10, 1010)])
    """

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        ordered = [(start, max(start, end)) for start, end in spans] or [(0.0, 1.0)]
        longest = _LONGEST_PAUSE * sum(end - start for start, end in ordered) or 1.0
        self.pauses: list[tuple[float, float]] = []
        self._times, self._places = [ordered[0][0]], [0.0]
        for start, end in ordered:
            pause = start - self._times[-1]
            if pause > longest:
                self.pauses.append((self._times[-1], start))
            self._add(start, min(max(pause, 0.0), longest))
            self._add(end, max(0.0, end - max(start, self._times[-1])))
        self._length = self._places[-1] or 1.0

    def _add(self, time: float, length: float) -> None:
        self._times.append(max(time, self._times[-1]))
        self._places.append(self._places[-1] + length)

    def position(self, time: float) -> float:
        """Return the position of a time. Times outside the run are at its ends."""
        after = bisect_right(self._times, time)
        if after == 0:
            return 0.0
        if after == len(self._times):
            return 1.0
        before, until = self._times[after - 1], self._times[after]
        start, end = self._places[after - 1], self._places[after]
        return (start + (end - start) * (time - before) / (until - before)) / self._length

    def time(self, position: float) -> float:
        """Return the time at a position."""
        place = min(max(position, 0.0), 1.0) * self._length
        after = min(max(bisect_right(self._places, place), 1), len(self._places) - 1)
        before, until = self._times[after - 1], self._times[after]
        start, end = self._places[after - 1], self._places[after]
        return before + (until - before) * (place - start) / (end - start) if end > start else until

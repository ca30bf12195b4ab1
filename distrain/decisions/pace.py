"""The slow ranks, from the samples of all ranks and from their numbers of reports. Runs in: coordinator.

Ranks that train in step report equally often. Of these, the slow one waits less for the others than they wait for it.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median_high, median_low
from typing import TYPE_CHECKING, Protocol

from distrain.api.observer import BecameSlow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain import wire

VITALS_S = 10.0
"""Seconds between two :class:`~distrain.wire.Vitals` of a rank."""
WINDOW_S = 20.0
_WINDOWS = 2
"""Windows in a row after which a rank is slow. Less may be an evaluation or a checkpoint."""
_LONGER = 1.2
"""A rank is slow if it takes so many times as long as the median rank from one collective to the next."""
_LEAST_SHARE = 0.1
"""That must also be so much of the whole time, which the others lose by it."""
_FEWER_REPORTS = 0.8
_LEAST_REPORTS = 2
"""A rank is slow if it makes less than this share of the reports of the median rank, and so many fewer."""
_SHORTEST = 0.01
"""The least share of the time that counts as the median's, so that no factor is infinite."""


class Progress(Protocol):
    """How far a rank is."""

    host: str
    reports: int
    step: float | None

    @property
    def ended(self) -> bool: ...


@dataclass(slots=True)
class _Window:
    """The window of a rank that is open now. It began with ``reports`` and ``since``."""

    reports: int = 0
    since: str | None = None
    own_s: float = 0.0
    waiting_s: float = 0.0
    places: dict[str, float] = field(default_factory=dict)

    @property
    def is_sampled(self) -> bool:
        return self.own_s + self.waiting_s > 0

    @property
    def own_share(self) -> float:
        return self.own_s / (self.own_s + self.waiting_s)


class Pace:
    """The pace of the ranks of one attempt, in windows.

    now: time.monotonic.
    """

    def __init__(self, ranks: int = 0, now: float = 0.0) -> None:
        self._began = now
        self._windows = [_Window() for _ in range(ranks)]
        self._since: dict[int, list[str | None]] = {}
        """By rank that has been slow in the last windows: the beginning of each of these."""

    @property
    def slow(self) -> set[int]:
        """The ranks that are slow now."""
        return {rank for rank, windows in self._since.items() if len(windows) >= _WINDOWS}

    def heard(self, vitals: wire.Vitals, ranks: Sequence[Progress], now: float) -> list[BecameSlow]:
        """Take the samples of a rank. Return the ranks that become slow now, the slowest first."""
        window = self._windows[vitals.rank]
        window.own_s += vitals.own_s
        window.waiting_s += vitals.waiting_s
        if vitals.place:
            window.places[vitals.place] = window.places.get(vitals.place, 0.0) + vitals.place_s
        return self._next_window(ranks, now) if now >= self._began + WINDOW_S else []

    def _next_window(self, ranks: Sequence[Progress], now: float) -> list[BecameSlow]:
        closed = dict(enumerate(self._windows))
        at_work = {rank: window for rank, window in closed.items() if not ranks[rank].ended}
        slower = {
            **_by_reports({rank: ranks[rank].reports - window.reports for rank, window in at_work.items()}),
            **_by_samples({rank: window.own_share for rank, window in at_work.items() if window.is_sampled}),
        }
        self._since = {rank: [*self._since.get(rank, ()), closed[rank].since] for rank in slower}
        self._began, self._windows = now, [_Window(rank.reports, _now_at(rank)) for rank in ranks]
        new = [rank for rank, windows in self._since.items() if len(windows) == _WINDOWS]
        found = [self._slow_rank(rank, ranks[rank].host, closed[rank], *slower[rank]) for rank in new]
        return sorted(found, key=lambda slow: -slow.factor)

    def _slow_rank(self, rank: int, host: str, window: _Window, factor: float, between: str) -> BecameSlow:
        place, seconds = max(window.places.items(), key=itemgetter(1), default=("", 0.0))
        share = seconds / window.own_s if window.own_s else 0.0
        return BecameSlow(rank, host, round(factor, 2), between, self._since[rank][0], place, round(share, 2))


def _by_samples(shares: Mapping[int, float]) -> dict[int, tuple[float, str]]:
    """Return the ranks that spend clearly more of their time on their own work than the median rank does."""
    middle = median_low(shares.values()) if shares else 0.0
    least = max(_LONGER * middle, middle + _LEAST_SHARE)
    return {rank: (share / max(middle, _SHORTEST), "collectives") for rank, share in shares.items() if share >= least}


def _by_reports(counts: Mapping[int, int]) -> dict[int, tuple[float, str]]:
    """Return the ranks that report clearly less often than the median rank. Those that never report do not count."""
    reporting = {rank: count for rank, count in counts.items() if count > 0}
    middle = median_high(reporting.values()) if reporting else 0
    least = min(_FEWER_REPORTS * middle, middle - _LEAST_REPORTS)
    return {rank: (middle / count, "reports") for rank, count in reporting.items() if count < least}


def _now_at(rank: Progress) -> str | None:
    if rank.step is not None:
        return f"step {rank.step:g}"
    return f"report {rank.reports}" if rank.reports else None

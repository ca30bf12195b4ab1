"""The slow ranks, from the samples of all ranks and from their numbers of reports. Runs in: coordinator.

Ranks that train in step report equally often. Of these, the slow one waits less for the others than they wait for it.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_high, median_low
from typing import TYPE_CHECKING

from distrain.api.observer import BecameSlow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain import wire
    from distrain.api.observer import RankEnd

VITALS_S = 20.0
"""Seconds between two :class:`~distrain.wire.Vitals` of a rank, between two comparisons of them, and between two looks
at the memory and the GPUs of a host."""
_COMPARISONS = 2
"""Comparisons in a row after which a rank is slow. Less may be an evaluation or a checkpoint."""
_LONGER = 1.2
"""A rank is slow if it takes so many times as long as the median rank from one collective to the next."""
_LEAST_SHARE = 0.1
"""That must also be so much of the whole time, which the others lose by it."""
_FEWER_REPORTS = 0.8
_LEAST_REPORTS = 2
"""A rank is slow if it makes less than this share of the reports of the median rank, and so many fewer."""
_SHORTEST = 0.01
"""The least share of the time that counts as the median's, so that no factor is infinite."""


@dataclass(slots=True)
class RankStatus:
    """One rank of the attempt. ``seen``: when it last reported or printed something, or began."""

    host: str
    seen: float
    begun: float | None = None
    end: RankEnd | None = None
    reports: int = 0
    reported: float = 0.0
    """When it made the last of its reports."""
    step: float | None = None

    @property
    def ended(self) -> bool:
        return self.end is not None

    @property
    def is_at_work(self) -> bool:
        return self.begun is not None and self.end is None


class Pace:
    """The pace of the ranks of one attempt, compared every :data:`VITALS_S`.

    now: time.monotonic.
    """

    def __init__(self, ranks: int = 0, now: float = 0.0) -> None:
        self._compared_at = now
        self._vitals: dict[int, wire.Vitals] = {}
        """By rank: the last ones since the last comparison."""
        self._reports = [0] * ranks
        self._progress: list[str | None] = [None] * ranks
        """By rank: its number of reports, and how far it was, at the last comparison."""
        self._since: dict[int, list[str | None]] = {}
        """By rank that was slow in the last comparisons: how far it was before each of them."""
        self.places: dict[int, str] = {}
        """By rank that has become slow: where it spends most of its own time, or nothing."""

    @property
    def slow(self) -> set[int]:
        """The ranks that are slow now."""
        return {rank for rank, since in self._since.items() if len(since) >= _COMPARISONS}

    def heard(self, vitals: wire.Vitals, ranks: Sequence[RankStatus], now: float) -> list[BecameSlow]:
        """Take the samples of a rank. Return the ranks that become slow now, the slowest first."""
        self._vitals[vitals.rank] = vitals
        if now < self._compared_at + VITALS_S:
            return []
        at_work = [rank for rank, state in enumerate(ranks) if not state.ended]
        slower = {
            **_by_reports({rank: ranks[rank].reports - self._reports[rank] for rank in at_work}),
            **_by_samples({rank: _own_share(self._vitals[rank]) for rank in at_work if rank in self._vitals}),
        }
        self._since = {rank: [*self._since.get(rank, ()), self._progress[rank]] for rank in slower}
        new = [rank for rank, since in self._since.items() if len(since) == _COMPARISONS]
        found = [self._slow_rank(rank, ranks[rank].host, *slower[rank]) for rank in new]
        self.places |= {one.rank: one.place for one in found}
        self._compared_at, self._vitals = now, {}
        self._reports, self._progress = [rank.reports for rank in ranks], [_now_at(rank) for rank in ranks]
        return sorted(found, key=lambda slow: -slow.factor)

    def _slow_rank(self, rank: int, host: str, factor: float, between: str) -> BecameSlow:
        vitals = self._vitals.get(rank)
        place, share = ("", 0.0) if vitals is None else (vitals.place, vitals.place_s / (vitals.own_s or 1.0))
        return BecameSlow(rank, host, round(factor, 2), between, self._since[rank][0], place, round(share, 2))


def _own_share(vitals: wire.Vitals) -> float:
    return vitals.own_s / ((vitals.own_s + vitals.waiting_s) or 1.0)


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


def _now_at(rank: RankStatus) -> str | None:
    if rank.step is not None:
        return f"step {rank.step:g}"
    return f"report {rank.reports}" if rank.reports else None

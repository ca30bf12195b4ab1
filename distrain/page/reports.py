"""The reports of a run, added one by one: curves, ranks and waiting times. Pure. Runs in: anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.page.envelope import MOST_POINTS, Envelope
from distrain.storage.retention import LOWEST_IS_BEST
from distrain.system.text import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.storage.runs.listing import Run

MOST_METRICS = 100
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_MOST = 100_000
"""Attempts, and ranks. With more of them, further lines count as damaged."""


@dataclass(slots=True)
class AttemptReports:
    """The reports of one attempt.

    first_step: the step of a report is this plus its index. lost_after: reports with later steps were repeated by a
    later attempt. kept_until: time of rank 0's last report that was not repeated; None if there is none. waits: for
    each rank, the seconds that its reports which were not repeated have waited, for data and for checkpoints.
    """

    first_step: int = 0
    lost_after: float = math.inf
    kept_until: float | None = None
    last_time: float = 0.0
    waits: dict[int, tuple[float, float]] = field(default_factory=dict)

    def keeps(self, step: int) -> bool:
        """Return whether no later attempt has repeated a step."""
        return step <= self.lost_after


@dataclass(slots=True)
class RankReports:
    """The reports of one rank in its last attempt: the first and the last time, their number, and the last step."""

    attempt: int
    began: float
    last: float = 0.0
    count: int = 0
    step: int = 0

    @property
    def interval(self) -> float:
        """The mean time between two reports."""
        return (self.last - self.began) / (self.count - 1) if self.count > 1 else 0.0


def beginnings(run: Run) -> tuple[object, list[tuple[object, bool]]]:
    """Return which run this is, and what its reports are counted from."""
    return run.manifest.get("run_id"), [(one.get("first_step"), "training" in one) for one in run.attempts]


class Reports:
    """The reports of a run. Of those that were repeated after a restart, the later ones are drawn.

    attempts: as in run.json, those that repeated a report included. most_points: of each curve.

    Attributes: ``attempts`` and ``ranks`` by number, ``curves`` of rank 0's metrics, ``times``: that of its reports in
    seconds since 1970, ``more_metrics``: the names of metrics beyond :data:`MOST_METRICS`, ``last``: rank 0's last
    report, with its step.
    """

    def __init__(self, attempts: Sequence[Mapping[str, Any]], most_points: int = MOST_POINTS) -> None:
        self.attempts: dict[int, AttemptReports] = {}
        lowest = math.inf
        for one in sorted(attempts, key=lambda one: -int(one["attempt"])):
            if (first := one.get("first_step")) is not None:
                self.attempts.setdefault(one["attempt"], AttemptReports(first, lowest))
                lowest = min(lowest, first) if one.get("training") else lowest
        self.ranks: dict[int, RankReports] = {}
        self.curves: dict[str, Envelope] = {}
        self.times = Envelope(most_points)
        self.more_metrics: set[str] = set()
        self.last: dict[str, Any] | None = None
        self._most_points = most_points

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a line. Raise an error of :data:`DAMAGE` if it is damaged."""
        attempt, rank, index, moment = record["attempt"], record["rank"], record["index"], record["time"]
        metrics = flatten(record["metrics"]) if rank == 0 else {}
        waits = record.get("waits") or {}
        waited = [min(float(waits.get(kind, 0.0)), 1e15) for kind in ("data", "checkpoint")]
        if max(len(self.attempts), len(self.ranks)) > _MOST:
            raise ValueError("too many attempts or ranks")
        follows = self.last["step"] if self.last else 0  # in an attempt whose first step is not known
        there = self.attempts.setdefault(attempt, AttemptReports(follows))
        there.last_time = max(there.last_time, moment)
        step = there.first_step + index
        seen = self.ranks.get(rank)
        if seen is None or seen.attempt != attempt:
            seen = self.ranks[rank] = RankReports(attempt, moment)
        seen.last, seen.count, seen.step = moment, seen.count + 1, step
        if there.keeps(step) and waits:
            before = there.waits.get(rank, (0.0, 0.0))
            there.waits[rank] = before[0] + waited[0], before[1] + waited[1]
        if rank == 0:
            self.last = {**record, "step": step}
            if there.keeps(step):
                there.kept_until = moment
                self.times.add(step, moment)
                self._add_to_curves(step, metrics)

    @property
    def last_metrics(self) -> dict[str, Any]:
        """Rank 0's last metrics, and the last value of each that is not among them, as of an evaluation."""
        last = flatten(self.last["metrics"]) if self.last else {}
        return last | {name: one.last[1] for name, one in self.curves.items() if one.last and name not in last}

    def best(self, metric: str) -> float | None:
        """Return the lowest value of a loss or an error, else the highest; None without one."""
        curve = self.curves.get(metric)
        point = curve and (curve.lowest if LOWEST_IS_BEST.search(metric.lower()) else curve.highest)
        return point[1] if point else None

    def _add_to_curves(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if name not in self.curves and len(self.curves) >= MOST_METRICS:
                self.more_metrics.add(name)
                continue
            if name not in self.curves:
                self.curves[name] = Envelope(self._most_points)
            self.curves[name].add(step, value)

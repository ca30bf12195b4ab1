"""What a drill has found: a verdict for each disturbance, and the numbers beside them. Runs in: coordinator."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.drilling.causes import Cause

BAD = ("drift", "failed")
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from a failure until the training goes on.

    detection: until the run knows of it. restart: until the ranks run the script. load: until the first step. repeat:
    for the steps that were lost.
    """

    detection_s: float
    restart_s: float
    load_s: float
    repeat_s: float

    @property
    def total_s(self) -> float:
        return self.detection_s + self.restart_s + self.load_s

    def __str__(self) -> str:
        parts = ((self.detection_s, "to notice"), (self.restart_s, "to start"), (self.load_s, "to load"))
        return f"trains again after {self.total_s:.2f} s ({', '.join(f'{s:.2f} {what}' for s, what in parts if s)})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one disturbance has shown.

    disturbance: such as ``kill -9 of rank 1``. outcome: ``exact``, ``noise`` (equal within it), ``drift``, ``failed``
    (the script did not go on), ``changed`` (with another number of workers) or ``skipped``. text: the verdict in words.
    lost: steps or reports that were repeated.
    """

    disturbance: str
    outcome: str
    text: str
    causes: Sequence[Cause] = ()
    lost: int | None = None
    times: Times | None = None

    @property
    def is_good(self) -> bool:
        return self.outcome not in BAD

    def __str__(self) -> str:
        return "; ".join([self.text, *([str(self.times)] if self.times else [])])


@dataclass(frozen=True, slots=True)
class Saving:
    """What checkpoints cost. cost_s: seconds for one. interval_s: seconds between two. restart_s: after a failure."""

    cost_s: float
    interval_s: float
    restart_s: float

    def best_interval_s(self, failures_per_day: float) -> float:
        """Return the seconds between two checkpoints that lose the least time.

        Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
        Generation Computer Systems 22 (2006), equation 37; its first term is J. W. Young's estimate (1974).

        >>> round(Saving(cost_s=2.0, interval_s=60.0, restart_s=5.0).best_interval_s(failures_per_day=1.0))
        587
        """
        mean_s = DAY_S / failures_per_day
        if self.cost_s >= 2 * mean_s:
            return mean_s
        share = self.cost_s / (2 * mean_s)
        return math.sqrt(2 * self.cost_s * mean_s) * (1 + math.sqrt(share) / 3 + share / 9) - self.cost_s

    def loss(self, interval_s: float, failures_per_day: float) -> float:
        """Return the share of time that is lost with checkpoints in such an interval."""
        per_failure_s = self.restart_s + (interval_s + self.cost_s) / 2
        return self.cost_s / (interval_s + self.cost_s) + per_failure_s * failures_per_day / DAY_S


@dataclass(frozen=True, slots=True)
class DrillReport:
    """The findings of a drill. ``directory``: its files, if they were kept.

    unit: what is counted, ``reports`` or ``steps``; ``until`` so many. workers: of the undisturbed run. saves_after_s:
    seconds from SIGTERM until a run that has saved has ended. notes: what is worth knowing about the script itself.
    """

    target: str
    workers: int
    unit: str
    until: int
    verdicts: Sequence[Verdict]
    saving: Saving | None
    saves_after_s: float | None
    notes: Sequence[str]
    seconds: float
    directory: str | None = None

    @property
    def ok(self) -> bool:
        """True if every resume was exact, or equal within noise."""
        return bool(self.verdicts) and all(one.is_good for one in self.verdicts)

    @property
    def cause_names(self) -> list[str]:
        """The names of all causes, each once."""
        return list(dict.fromkeys(cause.name for one in self.verdicts for cause in one.causes))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {"version": 1, "ok": self.ok, **asdict(self)}

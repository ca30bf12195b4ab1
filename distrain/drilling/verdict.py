"""The findings of a drill: a verdict for each disturbance, and the numbers beside them. Runs in: coordinator."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.drilling.causes import Cause
    from distrain.drilling.order import Unit

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from a failure until the training goes on.

    detection_s: until the run knows of it. restart_s: until the ranks run the script. load_s: until the first step.
    repeat_s: for what was lost.
    """

    detection_s: float
    restart_s: float
    load_s: float
    repeat_s: float

    @property
    def total_s(self) -> float:
        """All but the time for what was lost."""
        return self.detection_s + self.restart_s + self.load_s

    def __str__(self) -> str:
        parts = (("detection", self.detection_s), ("restart", self.restart_s), ("load", self.load_s))
        return f"{self.total_s:.1f} s ({', '.join(f'{name} {seconds:.2f}' for name, seconds in parts if seconds)})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The finding about one disturbance.

    disturbance: such as ``kill -9 of rank 1``.
    outcome: ``noise``: equal within it; ``state``: the state at the start is the same, with another number of workers;
        ``failed``: the script does not go on; ``refused``: it does not start with another number of workers;
        ``untested``: it ended too early.
    text: the verdict in words. lost: units that were repeated.
    """

    disturbance: str
    outcome: Literal["exact", "noise", "state", "drift", "failed", "refused", "untested"]
    text: str
    causes: Sequence[Cause] = ()
    lost: int | None = None
    times: Times | None = None

    @property
    def is_good(self) -> bool:
        """True unless the training goes on in another way, or not at all."""
        return self.outcome not in ("drift", "failed")


@dataclass(frozen=True, slots=True)
class Saving:
    """What checkpoints cost: seconds for one, between two, and from a failure until the training goes on."""

    cost_s: float
    interval_s: float
    restart_s: float

    def best_interval_s(self, failures_per_day: float) -> float:
        """Return the seconds between two checkpoints with which the least time is lost.

        Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
        Generation Computer Systems 22 (2006), equation 37; its first term is J. W. Young's estimate (1974).

        >>> round(Saving(cost_s=2.0, interval_s=60.0, restart_s=5.0).best_interval_s(failures_per_day=1.0))
        587
        """
        mean_s = _DAY_S / failures_per_day
        share = self.cost_s / (2 * mean_s)
        if share >= 1:
            return mean_s
        return math.sqrt(2 * self.cost_s * mean_s) * (1 + math.sqrt(share) / 3 + share / 9) - self.cost_s

    def loss(self, interval_s: float, failures_per_day: float) -> float:
        """Return the share of time that is lost with checkpoints in such an interval.

        >>> round(Saving(cost_s=2.0, interval_s=60.0, restart_s=5.0).loss(598.0, failures_per_day=1.0), 4)
        0.0069
        """
        per_failure_s = self.restart_s + (interval_s + self.cost_s) / 2
        return min(self.cost_s / (interval_s + self.cost_s) + per_failure_s * failures_per_day / _DAY_S, 1.0)


@dataclass(frozen=True, slots=True)
class DrillReport:
    """The findings of a drill.

    unit: what is counted, ``report`` or ``step``; ``until`` so many. workers: of the undisturbed run.
    preemption_s: seconds from SIGTERM to the end of a run that has saved. notes: what the drill could not compare.
    directory: all files, if they were kept.
    """

    target: str
    workers: int
    unit: Unit
    until: int
    verdicts: Sequence[Verdict]
    saving: Saving | None
    preemption_s: float | None
    notes: Sequence[str]
    seconds: float
    directory: str | None = None

    @property
    def ok(self) -> bool:
        """True if every resume was exact, or equal within noise."""
        return all(one.is_good for one in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {"ok": self.ok, **asdict(self)}

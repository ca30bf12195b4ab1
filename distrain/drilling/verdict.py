"""The findings of a drill: a verdict for each disturbance. Runs in: coordinator."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.drilling.causes import Cause
    from distrain.drilling.order import Unit


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

    @property
    def is_good(self) -> bool:
        """True unless the training goes on in another way, or not at all."""
        return self.outcome not in ("drift", "failed")


@dataclass(frozen=True, slots=True)
class DrillReport:
    """The findings of a drill.

    unit: what is counted, ``report`` or ``step``; ``until`` so many. workers: of the undisturbed run.
    notes: what the drill could not compare. directory: all files, if they were kept.
    """

    target: str
    workers: int
    unit: Unit
    until: int
    verdicts: Sequence[Verdict]
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

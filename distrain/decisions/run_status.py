"""The live state of a run. The engine keeps it up to date, and observers read it. Runs in: coordinator.

Pure: no I/O, no clock. Times are those of ``time.monotonic``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from distrain.api.observer import (
    AttemptBegan,
    Committed,
    HangBegan,
    HangEnded,
    Printed,
    RankEnded,
    RankTrains,
    Reported,
)
from distrain.decisions.pace import Pace, RankStatus
from distrain.storage.retention import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain import wire
    from distrain.api.observer import BecameSlow, Fact
    from distrain.hosts.troubles import Trouble

_RATE_WINDOW_S = 60.0
_SAMPLE_S = 0.25
"""Seconds between two samples from which the rate is computed."""
_PATIENCE_INTERVALS = 5
"""A rank is silent, and a report is late, after so many of the usual intervals between two reports at the earliest."""
_SILENT_AFTER_S = 20.0
_LATE_AFTER_S = 10.0
_ENDS = ("finished", "failed", "stopped")


@dataclass(slots=True)
class RunStatus:
    """The state of a run, made of the facts that it hears, and of what the engine sets.

    location: the run directory, as users know it.
    grace_s: the seconds that workers have to stop.
    """

    hears: ClassVar[tuple[type[Fact], ...]] = ()
    location: str
    started: float
    grace_s: float = 0.0
    phase: str = "connecting"
    is_stopping: bool = False
    is_debugged: bool = False
    """True while a rank waits for the person who debugs it, and others for that rank."""
    saves_on_stop: bool = False
    """True if ranks call should_stop(), so that they can save a checkpoint before they are stopped."""
    restarts: int = 0
    hang: HangBegan | None = None
    ranks: list[RankStatus] = field(default_factory=list)
    reports: int = 0
    """Those of rank 0 over the whole run, without those that a restart repeats; 0 before the first of an attempt."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Those of rank 0's last report, flat."""
    progress: Sequence[float] | None = None
    checkpoint: str | None = None
    checkpoint_at: float = 0.0
    lost_s: float = 0.0
    """Time that failures have cost: from the checkpoint before each until the next report, but for the time that one
    report takes usually."""
    _newest: int = -1
    """The index of the checkpoint: an older one may be committed later."""
    _lost_since: float | None = None
    _usual_s: float = 0.0
    """Between reports of rank 0 before."""
    _samples: deque[tuple[float, float]] = field(default_factory=deque)
    """Times, and the steps or reports of rank 0 that were done by then."""
    _pace: Pace = field(default_factory=Pace)
    _troubles: dict[str, list[Trouble]] = field(default_factory=dict)
    """By source, such as a host: what is wrong now."""

    @property
    def name(self) -> str:
        return self.location.rpartition("/")[2]

    @property
    def hosts(self) -> int:
        return len({rank.host for rank in self.ranks})

    # -- what happens ---------------------------------------------------------------------------------------------

    def hear(self, fact: Fact) -> None:
        """Note a fact."""
        match fact:
            case Reported():
                self._reported(fact)
            case Printed():
                self.ranks[fact.rank].seen = fact.now
            case AttemptBegan():
                self._begin_attempt(fact)
            case RankTrains():
                self.ranks[fact.rank].seen = self.ranks[fact.rank].begun = fact.now
            case RankEnded():
                self.ranks[fact.rank].end = self.ranks[fact.rank].end or fact.end
            case HangBegan():
                self.hang = fact
            case HangEnded():
                self.hang = None
            case Committed() if fact.index > self._newest:
                self.checkpoint, self.checkpoint_at, self._newest = fact.name, fact.now, fact.index

    def _begin_attempt(self, fact: AttemptBegan) -> None:
        if self.ranks:
            self.restarts += 1
            self._lost_since = self._lost_since or self._kept_until()
            first = self.ranks[0]
            if first.begun is not None and first.reports:
                self._usual_s = (first.reported - first.begun) / first.reports
        self.ranks, self.reports = [RankStatus(host, fact.now) for host in fact.hosts], 0
        self.progress, self._pace, self._troubles = None, Pace(len(fact.hosts), fact.now), {}
        self._samples.clear()

    def _kept_until(self) -> float:
        """Return until when the work of the last attempt is in a checkpoint."""
        begun = [rank.begun for rank in self.ranks if rank.begun is not None]
        return max(self.checkpoint_at, min(begun, default=0.0)) or self.started

    def _reported(self, fact: Reported) -> None:
        """Note a report. Called for every one, so it has to be cheap."""
        state, metrics, now = self.ranks[fact.rank], fact.metrics, fact.now
        state.seen, state.reported, state.reports = now, now, fact.index
        if fact.progress is not None:
            state.step = fact.progress[0]
        if self._lost_since is not None:
            self.lost_s += max(now - self._lost_since - self._usual_s, 0.0)
            self._lost_since = None
        if fact.rank == 0:
            self.progress, self.reports = fact.progress or self.progress, fact.number
            self.metrics = flatten(metrics) if any(type(value) is dict for value in metrics.values()) else metrics
            if not self._samples or now >= self._samples[-1][0] + _SAMPLE_S:
                self._take_sample(now, fact.index if fact.progress is None else fact.progress[0])

    def heard_vitals(self, vitals: wire.Vitals, now: float) -> list[BecameSlow]:
        """Note how a rank spends its time. Return the ranks that become slow by that: none while ranks stand still."""
        if self.hang is not None or self.is_debugged:
            return []
        return self._pace.heard(vitals, self.ranks, now)

    def heard_troubles(self, source: str, troubles: Sequence[Trouble]) -> tuple[list[Trouble], list[Trouble]]:
        """Note what is wrong now according to a source, such as a host. Return what is new, and what is over."""
        before, self._troubles[source] = self._troubles.get(source, []), list(troubles)
        return [one for one in troubles if one not in before], [one for one in before if one not in troubles]

    def _take_sample(self, now: float, done: float) -> None:
        """Take a sample for the rate."""
        self._samples.append((now, done))
        while self._samples[0][0] < now - _RATE_WINDOW_S and len(self._samples) > 2:
            self._samples.popleft()

    # -- what follows ---------------------------------------------------------------------------------------------

    @property
    def shown_phase(self) -> str:
        """The phase as users see it: a run stops as soon as it was asked to, and ports are a part of its start."""
        if self.is_stopping and self.phase not in _ENDS:
            return "stopping"
        if self.is_debugged:
            return "stopped by the debugger"
        if self.phase in ("reserving", "preparing", "starting"):
            return "restarting" if self.restarts else "starting"
        return self.phase

    def rate(self) -> float | None:
        """Return the steps per second of rank 0, or its reports per second if it gives no progress; or None."""
        if len(self._samples) < 2:
            return None
        (first, done), (last, more) = self._samples[0], self._samples[-1]
        return (more - done) / (last - first) if more > done else None

    def left_s(self) -> float | None:
        """Return the seconds until the last step at the present rate, or None."""
        rate = self.rate()
        if self.progress is None or rate is None:
            return None
        return (self.progress[1] - self.progress[0]) / rate

    def late_s(self, now: float) -> float | None:
        """Return the seconds since the last report of rank 0 if the next one is late, or None."""
        if self.is_debugged or not self.ranks or not self.ranks[0].is_at_work or not self.ranks[0].reports:
            return None
        seconds = now - self.ranks[0].reported
        return seconds if seconds > _patience_s(self.ranks[0], _LATE_AFTER_S) else None

    def silent(self, now: float) -> dict[int, float]:
        """Return the ranks that give no sign of life while others do or wait for them, and for how many seconds."""
        if self.is_debugged:
            return {}
        newest = max((rank.seen for rank in self.ranks if rank.is_at_work), default=0.0)
        return {
            number: now - rank.seen
            for number, rank in enumerate(self.ranks)
            if rank.is_at_work
            and (now if number in self._pace.slow else newest) - rank.seen > _patience_s(rank, _SILENT_AFTER_S)
        }

    def slow(self) -> list[int]:
        """Return the ranks that others wait for, or that make clearly fewer reports than the others."""
        return sorted(rank for rank in self._pace.slow if not self.ranks[rank].ended)

    def slow_place(self, rank: int) -> str:
        """Return where a slow rank spends most of its own time, such as ``load_batch (train.py:31)``, or nothing."""
        return self._pace.places.get(rank, "")

    def troubles(self) -> list[Trouble]:
        """Return what is wrong with memory and GPUs of ranks that have not ended."""
        return [one for those in self._troubles.values() for one in those if not self.ranks[one.rank].ended]


def _patience_s(rank: RankStatus, least_s: float) -> float:
    usual_s = (rank.seen - (rank.begun or 0.0)) / max(rank.reports, 1)
    return max(least_s, _PATIENCE_INTERVALS * usual_s)

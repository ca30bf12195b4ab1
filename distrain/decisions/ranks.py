"""The ranks of one attempt: the state of each, and how it has ended. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain.decisions.blame import failure_of
from distrain.decisions.states import RankState

if TYPE_CHECKING:
    from distrain import wire
    from distrain.errors import RankFailure
    from distrain.hosts.world import RankPlan, WorldPlan


@dataclass(slots=True)
class Rank:
    """One rank of an attempt.

    reports: number of reports that it has made.
    reason: why its native code aborted, if its output contains a reason.
    failed_order: its position in the order of failures, if it failed.
    entered: it has entered train_func.
    was_told: another rank had failed, and this one was told to end, before its outcome came.
    """

    plan: RankPlan
    state: RankState = RankState.PLANNED
    reports: int = 0
    reason: str = ""
    outcome: wire.Outcome | None = None
    exited: wire.Exited | None = None
    failed_order: int | None = None
    entered: bool = False
    was_told: bool = False

    @property
    def has_finished(self) -> bool:
        """True if the rank has sent a good outcome."""
        return self.outcome is not None and self.outcome.ok

    @property
    def failure(self) -> RankFailure | None:
        """Return the failure of the rank, if it failed by itself."""
        if self.failed_order is None:
            return None
        return failure_of(
            self.plan.rank,
            self.plan.host,
            self.failed_order,
            outcome=self.outcome,
            exited=self.exited,
            entered=self.entered,
            reason=self.reason,
            was_told=self.was_told,
        )


class Ranks:
    """The ranks of one attempt. Sums over them are kept up to date, because every message needs one.

    Attribute ``outcomes``: the good outcomes, by rank.
    Attribute ``failed``: the ranks that have failed or were stopped, in order.
    """

    def __init__(self, plan: WorldPlan | None = None) -> None:
        self.all = [Rank(plan=rank) for rank in plan.ranks] if plan is not None else []
        self.outcomes: dict[int, wire.Outcome] = {}
        self.failed: list[Rank] = []
        self._starting = self._working = len(self.all)
        self._stopped_early = 0

    def __getitem__(self, number: int) -> Rank:
        return self.all[number]

    @property
    def all_started(self) -> bool:
        """True if no rank is on its way to train_func."""
        return not self._starting

    @property
    def none_works(self) -> bool:
        """True if every rank has ended its work, well or badly."""
        return not self._working

    @property
    def all_finished(self) -> bool:
        """True if every rank has sent a good outcome, and there are ranks."""
        return len(self.outcomes) == len(self.all) > 0

    @property
    def all_work_is_done(self) -> bool:
        """True if, in addition, no rank has ended early because should_stop() was true."""
        return self.all_finished and not self._stopped_early

    def move(self, rank: Rank, new: RankState) -> None:
        """Put a rank into another state. The caller has looked up if the move is allowed."""
        self._starting -= rank.state is RankState.PLANNED
        self._working += (new in _WORKING) - (rank.state in _WORKING)
        rank.state = new

    def set_outcome(self, rank: Rank, outcome: wire.Outcome) -> None:
        """Note how a rank has ended its work."""
        rank.outcome = outcome
        if outcome.ok:
            self.outcomes[rank.plan.rank] = outcome
            self._stopped_early += outcome.stopped

    def drop_outcome(self, rank: Rank) -> None:
        """Forget the good outcome of a rank whose work is lost."""
        rank.outcome = None
        self._stopped_early -= self.outcomes.pop(rank.plan.rank).stopped

    def count_failure(self, rank: Rank) -> None:
        """Note that a rank has failed or was stopped."""
        if rank.failed_order is None:
            self.failed.append(rank)
            rank.failed_order = len(self.failed)

    def failures(self) -> list[RankFailure]:
        """Return the failures of ranks that failed by themselves, in order of arrival."""
        found = [rank.failure for rank in self.failed]
        return [failure for failure in found if failure is not None]


_WORKING = (RankState.PLANNED, RankState.RUNNING)

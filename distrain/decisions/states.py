"""The states of a run and of a rank, the allowed moves between them, and the ranks of an attempt. Runs in: anywhere.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distrain.decisions.failures import failure_of

if TYPE_CHECKING:
    from distrain import wire
    from distrain.errors import RankFailure
    from distrain.hosts.world import RankPlan, WorldPlan


class RunState(enum.Enum):
    """The state of a run, seen from the coordinator.

    A run without failures passes through CONNECTING, RESERVING, PREPARING, STARTING, RUNNING, RELEASING and SETTLING to
    FINISHED. An attempt that fails passes through SAVING, and one that ends early through STOPPING, to SETTLING. Then
    the run ends, or the next attempt begins with RESERVING.
    """

    CONNECTING = "connecting"
    """Agents are being started on the hosts. Too few of them have sent HELLO for an attempt."""
    RESERVING = "reserving"
    """An attempt has a plan. Hosts reserve the ports at which the ranks will connect to each other."""
    PREPARING = "preparing"
    """The ports are reserved. The checkpoint to start from is being verified, or hosts get files that they lack."""
    STARTING = "starting"
    """Workers are being started. Some have not entered train_func yet."""
    RUNNING = "running"
    """Every rank has entered train_func."""
    RELEASING = "releasing"
    """Every rank has finished its work. Their processes run exit handlers and end."""
    WAITING = "waiting"
    """The attempt has failed and all its processes are gone. The next attempt starts after the backoff."""
    SAVING = "saving"
    """The attempt has failed. Other ranks may complete a checkpoint before they are stopped."""
    STOPPING = "stopping"
    """The attempt ends early. Its processes are being stopped."""
    SETTLING = "settling"
    """No process of the attempt is left. Its last checkpoints are being committed, or uploaded."""
    FINISHED = "finished"
    """The run has ended: every rank has finished its work."""
    FAILED = "failed"
    """The run has ended: a failure was not followed by a restart, or the run could not start or continue."""
    ABORTED = "aborted"
    """The run has ended: the user asked it to stop."""

    @property
    def waits_for_files(self) -> bool:
        """True if the machine waits for :class:`~distrain.decisions.events.Outstanding` files and checkpoints."""
        return self in (RunState.PREPARING, RunState.SAVING, RunState.SETTLING)

    @property
    def has_ended_early(self) -> bool:
        """True if the attempt has failed, or is being stopped, and may have processes left."""
        return self in (RunState.SAVING, RunState.STOPPING)

    @property
    def is_terminal(self) -> bool:
        """True if the run has ended."""
        return self in (RunState.FINISHED, RunState.FAILED, RunState.ABORTED)


class RankState(enum.Enum):
    """The state of one rank of one attempt."""

    PLANNED = "planned"
    """The rank has a place on a host, where its process starts."""
    RUNNING = "running"
    """It has entered train_func."""
    DONE = "done"
    """It has sent a good outcome."""
    RAISED = "raised"
    """It has sent an exception as its outcome."""
    EXITED = "exited"
    """Its process is gone, or its host is lost."""


_ENDS = frozenset({RunState.FAILED, RunState.ABORTED})
_EARLY = frozenset({RunState.SAVING, RunState.STOPPING, RunState.FAILED})
RUN_MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.CONNECTING: _ENDS | {RunState.RESERVING},
    RunState.RESERVING: _EARLY | _ENDS | {RunState.PREPARING},
    RunState.PREPARING: _EARLY | _ENDS | {RunState.STARTING},
    RunState.STARTING: _EARLY | {RunState.RUNNING, RunState.RELEASING},
    RunState.RUNNING: _EARLY | {RunState.RELEASING},
    RunState.RELEASING: _EARLY | {RunState.SETTLING},
    RunState.SAVING: frozenset({RunState.STOPPING, RunState.SETTLING}),
    RunState.STOPPING: frozenset({RunState.SETTLING, RunState.FAILED}),
    RunState.SETTLING: _ENDS | {RunState.CONNECTING, RunState.RESERVING, RunState.WAITING, RunState.FINISHED},
    RunState.WAITING: _ENDS | {RunState.CONNECTING, RunState.RESERVING},
    RunState.FINISHED: frozenset({RunState.FAILED}),  # the last report could not be stored after all
    RunState.FAILED: frozenset(),
    RunState.ABORTED: frozenset(),
}
"""The states that may follow each state of a run."""

RANK_MOVES: dict[RankState, frozenset[RankState]] = {
    RankState.PLANNED: frozenset({RankState.RUNNING, RankState.RAISED, RankState.EXITED}),
    RankState.RUNNING: frozenset({RankState.DONE, RankState.RAISED, RankState.EXITED}),
    RankState.DONE: frozenset({RankState.EXITED}),
    RankState.RAISED: frozenset({RankState.EXITED}),
    RankState.EXITED: frozenset(),
}
"""The states that may follow each state of a rank."""


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
        failure = failure_of(
            self.plan.rank,
            self.plan.host,
            self.failed_order,
            outcome=self.outcome,
            exited=self.exited,
            entered=self.entered,
            reason=self.reason,
        )
        return replace(failure, consequence=True) if failure and self.was_told else failure


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

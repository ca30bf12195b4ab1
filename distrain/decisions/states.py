"""States of a run and of a rank, and the moves that are allowed: data only. Runs in: anywhere."""

from __future__ import annotations

import enum


class RunState(enum.Enum):
    """Where a run stands, seen from the coordinator."""

    CONNECTING = "connecting"  # agents are being started, too few have said HELLO for the next attempt
    RESERVING = "reserving"  # a new attempt: waiting for rank 0's host to reserve the rendezvous port
    STARTING = "starting"  # workers are being started, not all are in train_func
    RUNNING = "running"  # every rank has been in train_func
    RELEASING = "releasing"  # every rank has done its work; processes are leaving
    WAITING = "waiting"  # before the next attempt
    STOPPING = "stopping"  # the attempt is over before its end; waiting for every host to be empty
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def is_terminal(self) -> bool:
        return self in (RunState.FINISHED, RunState.FAILED, RunState.ABORTED)


class RankState(enum.Enum):
    """Where one rank of one attempt stands."""

    PLANNED = "planned"
    SPAWNED = "spawned"  # its process exists
    RUNNING = "running"  # it entered train_func
    DONE = "done"  # it reported a good outcome
    RAISED = "raised"  # it reported an exception
    EXITED = "exited"  # its process is gone


RUN_MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.CONNECTING: frozenset({RunState.RESERVING, RunState.STOPPING, RunState.FAILED, RunState.ABORTED}),
    RunState.RESERVING: frozenset({RunState.STARTING, RunState.STOPPING, RunState.FAILED, RunState.ABORTED}),
    RunState.STARTING: frozenset({RunState.RUNNING, RunState.RELEASING, RunState.STOPPING, RunState.FAILED}),
    RunState.RUNNING: frozenset({RunState.RELEASING, RunState.STOPPING, RunState.FAILED}),
    RunState.RELEASING: frozenset({RunState.FINISHED, RunState.STOPPING, RunState.FAILED, RunState.ABORTED}),
    RunState.WAITING: frozenset({RunState.CONNECTING, RunState.RESERVING, RunState.FAILED, RunState.ABORTED}),
    RunState.STOPPING: frozenset(
        {
            *(RunState.CONNECTING, RunState.RESERVING, RunState.WAITING),
            *(RunState.FINISHED, RunState.FAILED, RunState.ABORTED),
        }
    ),
    RunState.FINISHED: frozenset({RunState.FAILED}),  # what was reported last could not be stored after all
    RunState.FAILED: frozenset(),
    RunState.ABORTED: frozenset(),
}

RANK_MOVES: dict[RankState, frozenset[RankState]] = {
    # What a worker says may overtake the news that it was spawned.
    RankState.PLANNED: frozenset({RankState.SPAWNED, RankState.RUNNING, RankState.RAISED, RankState.EXITED}),
    RankState.SPAWNED: frozenset({RankState.RUNNING, RankState.RAISED, RankState.EXITED}),
    RankState.RUNNING: frozenset({RankState.DONE, RankState.RAISED, RankState.EXITED}),
    RankState.DONE: frozenset({RankState.EXITED}),
    RankState.RAISED: frozenset({RankState.EXITED}),
    RankState.EXITED: frozenset(),
}

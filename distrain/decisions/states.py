"""The states of a run and of a rank, and the allowed moves between them: data only. Runs in: anywhere."""

from __future__ import annotations

import enum


class RunState(enum.Enum):
    """The state of a run, seen from the coordinator.

    A run without failures passes through CONNECTING, RESERVING, STARTING, RUNNING and RELEASING to FINISHED. An attempt
    that ends early passes through STOPPING; then the run ends, or the next attempt begins with RESERVING.
    """

    CONNECTING = "connecting"
    """Agents are being started on the hosts. Too few of them have said HELLO for an attempt."""
    RESERVING = "reserving"
    """An attempt has a plan. Hosts reserve the ports at which the ranks will connect to each other."""
    STARTING = "starting"
    """Workers are being started. Some have not entered train_func yet."""
    RUNNING = "running"
    """Every rank has entered train_func."""
    RELEASING = "releasing"
    """Every rank has finished its work. Their processes run exit handlers and end."""
    WAITING = "waiting"
    """The attempt has failed and all its processes are gone. The next attempt starts after the backoff."""
    STOPPING = "stopping"
    """The attempt ends early. Its processes are being stopped, or may complete a checkpoint before they are."""
    FINISHED = "finished"
    """The run has ended: every rank has finished its work."""
    FAILED = "failed"
    """The run has ended: a failure was not followed by a restart, or the run could not start or continue."""
    ABORTED = "aborted"
    """The run has ended: the user asked it to stop."""

    @property
    def is_terminal(self) -> bool:
        """True if the run has ended."""
        return self in (RunState.FINISHED, RunState.FAILED, RunState.ABORTED)


class RankState(enum.Enum):
    """The state of one rank of one attempt."""

    PLANNED = "planned"
    """The rank has a place on a host, and no process that the coordinator knows of."""
    SPAWNED = "spawned"
    """Its process exists."""
    RUNNING = "running"
    """It has entered train_func."""
    DONE = "done"
    """It has sent a good outcome."""
    RAISED = "raised"
    """It has sent an exception as its outcome."""
    EXITED = "exited"
    """Its process is gone, or its host is lost."""


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
    RunState.FINISHED: frozenset({RunState.FAILED}),  # the last report could not be stored after all
    RunState.FAILED: frozenset(),
    RunState.ABORTED: frozenset(),
}
"""The states that may follow each state of a run."""

RANK_MOVES: dict[RankState, frozenset[RankState]] = {
    # The news that a worker was spawned may arrive after its own first message.
    RankState.PLANNED: frozenset({RankState.SPAWNED, RankState.RUNNING, RankState.RAISED, RankState.EXITED}),
    RankState.SPAWNED: frozenset({RankState.RUNNING, RankState.RAISED, RankState.EXITED}),
    RankState.RUNNING: frozenset({RankState.DONE, RankState.RAISED, RankState.EXITED}),
    RankState.DONE: frozenset({RankState.EXITED}),
    RankState.RAISED: frozenset({RankState.EXITED}),
    RankState.EXITED: frozenset(),
}
"""The states that may follow each state of a rank."""

"""The states of a run and of a rank, and the allowed moves between them. Runs in: anywhere.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from distrain.errors import InvalidTransition

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Mapping


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
    STOPPED = "stopped"
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
        return self in (RunState.FINISHED, RunState.FAILED, RunState.STOPPED)


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


_ENDS = frozenset({RunState.FAILED, RunState.STOPPED})
_EARLY = frozenset({RunState.SAVING, RunState.STOPPING, RunState.FAILED})
_MOVES: Mapping[enum.Enum, frozenset[enum.Enum]] = {
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
    RunState.STOPPED: frozenset(),
    RankState.PLANNED: frozenset({RankState.RUNNING, RankState.RAISED, RankState.EXITED}),
    RankState.RUNNING: frozenset({RankState.DONE, RankState.RAISED, RankState.EXITED}),
    RankState.DONE: frozenset({RankState.EXITED}),
    RankState.RAISED: frozenset({RankState.EXITED}),
    RankState.EXITED: frozenset(),
}
"""The states that may follow each state of a run, and each state of a rank."""
STORY_LENGTH = 200
"""Number of moves that InvalidTransition shows."""


def note_move(story: deque[str], who: str, old: RunState | RankState, new: RunState | RankState) -> None:
    """Add a move to the story of a run. Raise InvalidTransition, with the story, if it is not allowed."""
    story.append(f"{who}: {old.name} -> {new.name}")
    if new not in _MOVES[old]:
        raise InvalidTransition("\n".join([f"illegal move of {who}; please report this bug", *story]))

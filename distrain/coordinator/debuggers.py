"""The debuggers of ranks, and the people who use them. Runs in: coordinator.

A person has a process of ``distrain debug``, which is connected as other commands are
(:mod:`distrain.coordinator.requests`). What pdb and the terminal tell each other travels over the connection to the
agent of the rank's host, so no port is opened.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.requests import DEBUG, TYPED, check_rank
from distrain.decisions.events import AttemptStarts, HostLost
from distrain.decisions.hearing import hears
from distrain.decisions.states import RunState
from distrain.storage.runs.listing import NoSuchRun
from distrain.system.log import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.run_status import RunStatus
    from distrain.wire.channel import Channel


@dataclass(eq=False)
class Debuggers:
    """Connect people with the debuggers of ranks.

    debug_rank: the rank whose breakpoint() waits for a person.
    ask: asks a rank for something; see :class:`~distrain.wire.Ask`.
    """

    store: RunStore
    status: RunStatus
    debug_rank: int | None
    ask: Callable[..., None]

    def __post_init__(self) -> None:
        self._users: dict[int, Channel] = {}
        """By rank: the connection to the person who debugs it."""
        self._waiting: dict[int, wire.DebuggerSays] = {}
        """By rank that waits for an answer: what its debugger has said."""

    @property
    def is_waiting(self) -> bool:
        """True while a rank is stopped and waits for a person."""
        return bool(self._waiting)

    def close(self, why: str = "the run has ended") -> None:
        """Disconnect all people, and say why."""
        for rank in (*self._users, *self._waiting):
            self._end(rank, why)

    # -- ranks ----------------------------------------------------------------------------------------------------

    @hears(AttemptStarts)
    def on_attempt(self, _: str, starts: AttemptStarts) -> None:
        """Disconnect all people: they have debugged workers of the last attempt."""
        self.close("the workers were restarted")

    @hears(wire.Exited)
    def on_exited(self, _: str, message: wire.Exited) -> None:
        """Disconnect the person who debugs a rank that has ended."""
        self._end(message.rank, f"rank {message.rank} has ended")

    @hears(HostLost)
    def on_lost(self, _: str, lost: HostLost) -> None:
        """Disconnect the people who debug ranks of a host that was lost."""
        for rank in (*self._users, *self._waiting):
            if self.status.ranks[rank].host == lost.host:
                self._end(rank)

    @hears(wire.DebuggerSays)
    def handle(self, _: str, message: wire.DebuggerSays) -> None:
        """Pass on what the debugger of a rank says. If the rank to debug waits and nobody is there, ask for somebody.

        Any other rank continues if nobody is there.
        """
        rank, user = message.rank, self._users.get(message.rank)
        self._waiting.pop(rank, None)
        if user is not None:
            user.queue(message)
            if message.closed is not None:
                self._users.pop(rank).close()
        if not message.stopped:
            return
        self._waiting[rank] = message
        is_wanted = user is not None or rank == self.debug_rank
        if not is_wanted or self.status.phase == RunState.STOPPING.value:
            self._answer(rank)  # it may have been asked to stop here while it was in native code
        elif user is None:
            command = f"distrain debug {shlex.quote(str(self.store.location))} -r {rank}"
            say(f"rank {rank} {message.stopped}, and waits for you; open pdb in another terminal with: {command}")

    def _end(self, rank: int, why: str = "") -> None:
        """Disconnect the person who debugs a rank, which has ended."""
        self.handle("", wire.DebuggerSays(attempt=0, rank=rank, closed=why or f"rank {rank} has ended"))

    def _answer(self, rank: int, typed: bytes = b"") -> None:
        """Tell the debugger of a rank what a person has typed; nothing if they are gone."""
        self._waiting.pop(rank, None)
        self.ask(rank, what=TYPED, body=typed)

    # -- people ---------------------------------------------------------------------------------------------------

    def connect(self, user: Channel, asked: wire.Ask) -> None:
        """Connect a ``distrain debug`` to a rank, and open pdb there, again if it is connected. Raises NoSuchRun."""
        rank = check_rank(asked.rank, self.status)
        if self._users.get(rank, user) is not user:
            raise NoSuchRun(f"another `distrain debug` has rank {rank}")
        if self.status.ranks[rank].begun is None:
            raise NoSuchRun(f"rank {rank} has not entered train_func yet; try again when it has")
        is_new = rank not in self._users
        self._users[rank] = user
        if is_new and rank in self._waiting:
            user.queue(self._waiting[rank])
        else:
            self.ask(rank, what=DEBUG)

    def hear_user(self, user: Channel, asked: wire.Ask) -> None:
        """Pass on what a person has typed."""
        if self._users.get(asked.rank) is user:
            self._answer(asked.rank, asked.body)

    def disconnect(self, user: Channel) -> None:
        """Note that a process that may be a ``distrain debug`` is gone."""
        for rank in [rank for rank, one in self._users.items() if one is user]:
            del self._users[rank]
            self._answer(rank)

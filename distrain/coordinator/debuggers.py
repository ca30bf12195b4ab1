"""The debuggers of ranks, and the people who use them. Runs in: coordinator.

A person has a process of ``distrain debug``, which is connected as other commands are (:mod:`.requests`). What pdb and
the terminal tell each other travels over the connection to the agent of the rank's host, so no port is opened.
"""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.requests import DEBUG, check_rank
from distrain.decisions.events import AttemptStarts, HostLost
from distrain.decisions.hearing import hears
from distrain.decisions.states import RunState
from distrain.errors import WireError
from distrain.storage.runs.listing import NoSuchRun
from distrain.system.log import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.run_status import RunStatus
    from distrain.system.loop import Loop
    from distrain.wire.channel import Channel


@dataclass(slots=True)
class _Debugger:
    """The debugger of one rank.

    user: the connection to the person. waits: what it has said last, if it waits for an answer.
    """

    user: Channel | None = None
    waits: wire.DebuggerSays | None = None


@dataclass(eq=False)
class Debuggers:
    """Connect people with the debuggers of ranks.

    debug_rank: the rank whose breakpoint() waits for a person.
    ask: asks a rank for something; see :class:`~distrain.wire.Ask`.
    """

    loop: Loop
    store: RunStore
    status: RunStatus
    debug_rank: int | None
    ask: Callable[..., None]

    def __post_init__(self) -> None:
        self._debuggers: dict[int, _Debugger] = {}

    @property
    def is_waiting(self) -> bool:
        """True while a rank is stopped and waits for a person."""
        return any(debugger.waits is not None for debugger in self._debuggers.values())

    def close(self, why: str = "the run has ended") -> None:
        """Disconnect all people, and say why."""
        for rank in list(self._debuggers):
            self._end(rank, why)

    # -- ranks ----------------------------------------------------------------------------------------------------

    @hears(AttemptStarts)
    def on_attempt(self, _: str, starts: AttemptStarts) -> None:
        """Disconnect all people: they have debugged workers of the last attempt."""
        self.close("the workers were restarted")

    @hears(wire.Exited)
    def on_exited(self, _: str, message: wire.Exited) -> None:
        """Disconnect the person who debugs a rank that has ended."""
        self._end(message.rank)

    @hears(HostLost)
    def on_lost(self, _: str, lost: HostLost) -> None:
        """Disconnect the people who debug ranks of a host that was lost."""
        for rank in [rank for rank in self._debuggers if self.status.ranks[rank].host == lost.host]:
            self._end(rank)

    @hears(wire.DebuggerSays)
    def handle(self, _: str, message: wire.DebuggerSays) -> None:
        """Pass on what the debugger of a rank says. If the rank to debug waits and nobody is there, ask for somebody.

        Any other rank continues if nobody is there.
        """
        rank = message.rank
        debugger = self._debuggers.setdefault(rank, _Debugger())
        debugger.waits = message if message.stopped else None
        if debugger.user is not None:
            debugger.user.queue(message)
            if message.closed is not None:
                debugger.user.close()
        if message.closed is not None:
            del self._debuggers[rank]
        if debugger.waits is None:
            return
        is_wanted = debugger.user is not None or rank == self.debug_rank
        if not is_wanted or self.status.phase == RunState.STOPPING.value:
            self._tell(rank, "typed")  # it may have been asked to stop here while it was in native code
        elif debugger.user is None:
            command = f"distrain debug {shlex.quote(str(self.store.location))} -r {rank}"
            say(f"rank {rank} {message.stopped}, and waits for you; open pdb in another terminal with: {command}")

    def _end(self, rank: int, why: str = "") -> None:
        """Disconnect the person who debugs a rank, which has ended."""
        if rank in self._debuggers:
            self.handle("", wire.DebuggerSays(attempt=0, rank=rank, closed=why or f"rank {rank} has ended"))

    def _tell(self, rank: int, what: str, body: bytes = b"") -> None:
        """Have a rank open pdb, or tell it what a person has typed; nothing if they are gone."""
        if what != DEBUG:
            self._debuggers[rank].waits = None
        self.ask(rank, what=what, body=body)

    # -- people ---------------------------------------------------------------------------------------------------

    def connect(self, user: Channel, asked: wire.Ask) -> None:
        """Connect a ``distrain debug`` to a rank, and open pdb there. Raise NoSuchRun if that is not possible."""
        rank = check_rank(asked.rank, self.status)
        debugger = self._debuggers.get(rank)
        if debugger is not None and debugger.user is not None:
            raise NoSuchRun(f"another `distrain debug` has rank {rank}")
        if self.status.ranks[rank].begun is None:
            raise NoSuchRun(f"rank {rank} has not entered train_func yet; try again when it has")
        user.attach(self.loop, partial(self._on_frames, rank, user))
        debugger = self._debuggers.setdefault(rank, _Debugger())
        debugger.user = user
        if debugger.waits is not None:
            user.queue(debugger.waits)
        else:
            self._tell(rank, DEBUG)

    def _on_frames(self, rank: int, user: Channel, frames: list[wire.Frame]) -> None:
        """Pass on what a person sends. At the end of the connection, the debugger hears that they are gone."""
        debugger = self._debuggers.get(rank)
        if debugger is None or debugger.user is not user:
            user.close()
            return
        messages: list[wire.Message] = []
        with contextlib.suppress(WireError):
            messages = [frame.message() for frame in frames]
        for message in messages:
            if isinstance(message, wire.Ask):
                self._tell(rank, message.what, message.body)
        if not messages:
            user.close()
            debugger.user = None
            self._tell(rank, "typed")

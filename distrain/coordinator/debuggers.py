"""The debuggers of ranks, and the people who use them. Runs in: coordinator.

A person has a process of ``distrain debug``, which listens at a socket. What pdb and the terminal tell each other
travels over the connection to the agent of the rank's host, so no port is opened.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.requests import rank_in
from distrain.decisions.events import AttemptStarts, HostLost
from distrain.decisions.hearing import hears
from distrain.decisions.states import RunState
from distrain.errors import WireError
from distrain.storage.runs.listing import NoSuchRun
from distrain.system.log import say
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.run_status import RunStatus
    from distrain.system.loop import Loop


@dataclass(eq=False)
class Debuggers:
    """Connect people with the debuggers of ranks.

    debug_rank: the rank whose breakpoint() waits for a person.
    send: sends a rank what a person has sent, or has it open pdb.
    """

    loop: Loop
    store: RunStore
    status: RunStatus
    debug_rank: int | None
    send: Callable[[int, bytes, bool], None]

    def __post_init__(self) -> None:
        self._people: dict[int, Channel] = {}
        """By rank: the connection to the person who debugs it."""
        self._waiting: dict[int, wire.DebuggerSays] = {}
        """By rank whose debugger waits for an answer: what it has said last."""

    @property
    def is_waiting(self) -> bool:
        """True while a rank is stopped and waits for a person."""
        return bool(self._waiting)

    def close(self, why: str = "the run has ended") -> None:
        """Disconnect all people, and say why."""
        for rank in {*self._people, *self._waiting}:
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
        for rank in {*self._people, *self._waiting}:
            if self.status.ranks[rank].host == lost.host:
                self._end(rank, f"rank {rank} has ended")

    @hears(wire.DebuggerSays)
    def handle(self, _: str, message: wire.DebuggerSays) -> None:
        """Pass on what the debugger of a rank says. If the rank to debug waits and nobody is there, ask for somebody.

        Any other rank continues if nobody is there.
        """
        rank, user = message.rank, self._people.get(message.rank)
        self._waiting.pop(rank, None)
        if user is not None:
            user.queue(message)
            if message.closed is not None:
                self._people.pop(rank).close()
        if not message.stopped:
            return
        self._waiting[rank] = message
        is_wanted = user is not None or rank == self.debug_rank
        if not is_wanted or self.status.phase == RunState.STOPPING.value:
            self._tell(rank)  # it may have been asked to stop here while it was in native code
        elif user is None:
            command = f"distrain debug {shlex.quote(str(self.store.location))} -r {rank}"
            say(f"rank {rank} {message.stopped}, and waits for you; open pdb in another terminal with: {command}")

    def _end(self, rank: int, why: str) -> None:
        """Disconnect the person who debugs a rank, if there is one."""
        self.handle("", wire.DebuggerSays(attempt=0, rank=rank, closed=why))

    def _tell(self, rank: int, body: bytes = b"", *, opens: bool = False) -> None:
        """Tell a rank what a person has sent; nothing if they are gone."""
        if not opens:
            self._waiting.pop(rank, None)
        self.send(rank, body, opens)

    # -- people ---------------------------------------------------------------------------------------------------

    def connect(self, reply: Callable[[str], None], argument: str) -> None:
        """Connect a ``distrain debug`` to a rank, and open pdb there. Raise NoSuchRun or OSError if that fails.

        argument: the rank, and the path of the socket.
        """
        rank, path = rank_in(argument, self.status)
        if rank in self._people:
            raise NoSuchRun(f"another `distrain debug` has rank {rank}")
        if self.status.ranks[rank].begun is None:
            raise NoSuchRun(f"rank {rank} has not entered train_func yet; try again when it has")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            connection.connect(path)
            fd = connection.detach()
        user = Channel(fd, fd)
        user.attach(self.loop, partial(self._on_frames, rank, user))
        self._people[rank] = user
        if rank in self._waiting:
            user.queue(self._waiting[rank])
        else:
            self._tell(rank, opens=True)
        reply("")

    def _on_frames(self, rank: int, user: Channel, frames: list[wire.Frame]) -> None:
        """Pass on what a person sends. At the end of the connection, the debugger hears that they are gone."""
        if self._people.get(rank) is not user:
            user.close()
            return
        messages: list[wire.Message] = []
        with contextlib.suppress(WireError):
            messages = [frame.message() for frame in frames]
        for message in messages:
            if isinstance(message, wire.DebuggerInput):
                self._tell(rank, message.body, opens=message.opens)
        if not messages:
            user.close()
            del self._people[rank]
            self._tell(rank)

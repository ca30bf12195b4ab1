"""The debuggers of ranks, and the terminals of the people who use them. Runs in: coordinator.

A terminal is a process of ``distrain debug``, which listens at a socket. Its messages travel over
the connection to the agent of the rank's host, so no port is opened. With ``--dap`` it relays the
bytes of an editor.
"""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.requests import rank_in
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


@dataclass(slots=True)
class _Debugger:
    """The debugger of one rank. ``waits``: what it has said last, if the rank waits for an answer."""

    terminal: Channel | None = None
    waits: wire.DebuggerSays | None = None


class Debuggers:
    """Connect terminals with the debuggers of ranks.

    debug_rank: the rank whose breakpoint() waits for a terminal.
    send: sends a message to a rank. on_change: called when :attr:`is_waiting` may have changed.
    """

    def __init__(
        self,
        loop: Loop,
        store: RunStore,
        status: RunStatus,
        *,
        debug_rank: int | None,
        send: Callable[[wire.ToWorker], None],
        on_change: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._run = str(store.location)
        self._status = status
        self._debug_rank = debug_rank
        self._send = send
        self._on_change = on_change
        self._attempt = -1
        self._debuggers: dict[int, _Debugger] = {}

    @property
    def is_waiting(self) -> bool:
        """True while a rank is stopped and waits for a person."""
        return any(debugger.waits is not None for debugger in self._debuggers.values())

    def begin(self, attempt: int) -> None:
        """Disconnect the terminals of the last attempt."""
        self.close("the workers were restarted")
        self._attempt = attempt

    def close(self, why: str = "the run has ended") -> None:
        """Disconnect all terminals, and say why."""
        for rank in list(self._debuggers):
            self.rank_ended(rank, why)

    # -- ranks ----------------------------------------------------------------------------------------------------

    def handle(self, message: wire.DebuggerSays) -> None:
        """Show what the debugger of a rank says. Without a terminal, ask the user to open one."""
        debugger = self._debuggers.setdefault(message.rank, _Debugger())
        debugger.waits = None if message.prompt is None else message
        if message.closed is not None:
            del self._debuggers[message.rank]
        if (terminal := debugger.terminal) is not None:
            terminal.queue(message)
            if message.closed is not None:
                terminal.close()
        self._on_change()
        if debugger.waits is not None and self._status.phase == RunState.STOPPING.value:
            self._tell(message.rank, "line")  # it was asked to stop here while it was in native code
        elif debugger.waits is not None and terminal is None:
            self._ask_for_terminal(message)

    def rank_begins(self, rank: int) -> None:
        """Stop a rank that has entered train_func, if a terminal waits for it."""
        if rank in self._debuggers:
            self._tell(rank, "stop")

    def rank_ended(self, rank: int, why: str = "") -> None:
        """Disconnect the terminal of a rank that has ended."""
        if rank in self._debuggers:
            why = why or f"rank {rank} has ended"
            self.handle(wire.DebuggerSays(attempt=self._attempt, rank=rank, body=b"", closed=why))

    def _tell(self, rank: int, word: str, body: bytes = b"") -> None:
        if word == "line":
            self._debuggers[rank].waits = None
            self._on_change()
        self._send(wire.DebuggerInput(attempt=self._attempt, rank=rank, word=word, body=body))

    def _ask_for_terminal(self, waits: wire.DebuggerSays) -> None:
        """Let the rank to debug wait for a terminal. Any other one has lost its terminal, and continues."""
        if waits.rank != self._debug_rank:
            self._tell(waits.rank, "line")
            return
        where = f" in {waits.place}" if waits.place else ""
        what = f"has raised {waits.error}" if waits.error else "has stopped"
        command = f"distrain debug {shlex.quote(self._run)} -r {waits.rank}"
        say(f"rank {waits.rank} {what}{where}, and waits for you; open pdb in another terminal with: {command}")

    # -- terminals ------------------------------------------------------------------------------------------------

    def connect(self, reply: Callable[[str], None], argument: str, *, for_editor: bool = False) -> None:
        """Connect a ``distrain debug`` to a rank, and stop that. Raise NoSuchRun if this is not possible.

        argument: the rank, and the path of the socket.
        for_editor: start debugpy instead; only the editor stops the rank.
        """
        rank, path = rank_in(argument, self._status)
        has_begun = self._status.ranks[rank].begun is not None
        debugger = self._debuggers.get(rank, _Debugger())
        if debugger.terminal is not None:
            raise NoSuchRun(f"another `distrain debug` has rank {rank}")
        if for_editor and debugger.waits is not None:
            raise NoSuchRun(f"rank {rank} waits for pdb; run this command without --dap")
        if for_editor and not has_begun:
            raise NoSuchRun(f"rank {rank} has not entered train_func yet; try again when it has")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            try:
                connection.connect(path)
            except OSError as error:
                raise NoSuchRun(f"the debugger cannot be connected: {error}") from None
            fd = connection.detach()
        self._debuggers[rank] = debugger
        terminal = debugger.terminal = Channel(fd, fd)
        closing = wire.DebuggerInput(attempt=0, rank=rank, word="editor" if for_editor else "line")
        terminal.attach(self._loop, partial(self._on_frames, rank, terminal, closing))
        if for_editor:
            self._tell(rank, "edit")
        elif debugger.waits is not None:
            terminal.queue(debugger.waits)
        elif has_begun:
            self._tell(rank, "stop")
        reply("")

    def _on_frames(self, rank: int, terminal: Channel, closing: wire.DebuggerInput, frames: list[wire.Frame]) -> None:
        """Pass on what a person or an editor sends. ``closing``: what that is once they are gone, or not ours."""
        debugger = self._debuggers.get(rank)
        if debugger is None or debugger.terminal is not terminal:
            terminal.close()
            return
        messages = [_input_in(frame) or closing for frame in frames] or [closing]
        for message in messages:
            has_crossed = message.word != "editor" and (debugger.waits is not None) != (message.word == "line")
            if not has_crossed:
                self._tell(rank, message.word, message.body)
        if closing.word == "line" and any(message.word == "line" and not message.body for message in messages):
            terminal.close()
            debugger.terminal = None
            if debugger.waits is not None:
                self._tell(rank, "line")


def _input_in(frame: wire.Frame) -> wire.DebuggerInput | None:
    try:
        message = frame.message()
    except WireError:
        return None
    return message if isinstance(message, wire.DebuggerInput) else None

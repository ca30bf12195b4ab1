"""The debuggers of ranks, and the terminals of the people who use them. Runs in: coordinator.

A terminal is a process of ``distrain debug``, which listens at a socket in the run directory. Its messages travel over
the connection to the agent of the rank's host, so no port is opened.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from distrain import wire
from distrain.api.observer import TerminalLent
from distrain.system import process
from distrain.system.log import say
from distrain.system.text import count
from distrain.wire.channel import Channel
from distrain.wire.unix_sockets import connect_to

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from distrain.coordinator.observers import Observers
    from distrain.coordinator.store.run_store import RunStore
    from distrain.system.loop import Loop

    FromDebugger: TypeAlias = wire.DebuggerOutput | wire.DebuggerPrompt | wire.DebuggerClosed

_MOST_UNSEEN = 64 << 10
"""Bytes of output that are kept for a terminal that is not connected yet."""
_TERMINAL_TIMEOUT_S = 1.0
"""Seconds that a ``distrain debug`` gets to end after its connection was closed, before it is killed."""


@dataclass(slots=True)
class _Debugger:
    """The debugger of one rank. ``unseen``: its output while there is no terminal."""

    terminal: Channel | None = None
    unseen: bytes = b""
    prompt: wire.DebuggerPrompt | None = None

    def show(self, message: wire.Message) -> None:
        if self.terminal is not None:
            self.terminal.queue(message)
        elif isinstance(message, wire.DebuggerOutput):
            self.unseen = (self.unseen + message.body)[-_MOST_UNSEEN:]


class Debuggers:
    """Connect terminals with the debuggers of ranks.

    debug_rank: the rank whose breakpoint() waits for a terminal. It gets the terminal of this process, if there is one.
    send: sends a message to a rank, or to the agent of its host. on_change: called when :attr:`is_waiting` may have
    changed.
    """

    def __init__(
        self,
        loop: Loop,
        store: RunStore,
        observers: Observers,
        *,
        debug_rank: int | None,
        send: Callable[[wire.BreakIn | wire.DebuggerInput], None],
        on_change: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._paths = store.paths
        self._run = str(store.location)
        self._status = observers.status
        self._debug_rank = debug_rank
        self._send = send
        self._on_change = on_change
        self._attempt = -1
        self._debuggers: dict[int, _Debugger] = {}
        self._own_terminal = OwnTerminal(loop, observers, on_end=self._own_terminal_ended)

    @property
    def is_waiting(self) -> bool:
        """True while a rank is stopped and waits for a person."""
        return any(debugger.prompt is not None for debugger in self._debuggers.values())

    def begin(self, attempt: int) -> None:
        """Forget the last attempt."""
        self._disconnect("the workers were restarted")
        self._attempt = attempt

    def close(self) -> None:
        """Disconnect all terminals at the end of the run."""
        self._disconnect("the run has ended")
        self._own_terminal.close()

    def _disconnect(self, why: str) -> None:
        for rank in list(self._debuggers):
            self.rank_ended(rank, why)

    # -- ranks ----------------------------------------------------------------------------------------------------

    def handle(self, message: FromDebugger) -> None:
        """Handle what the debugger of a rank says."""
        debugger = self._debuggers.setdefault(message.rank, _Debugger())
        debugger.show(message)
        match message:
            case wire.DebuggerPrompt():
                debugger.prompt = message
                self._on_change()
                if debugger.terminal is None:
                    self._find_terminal(message)
            case wire.DebuggerClosed():
                self._forget(message.rank)

    def rank_begins(self, rank: int) -> None:
        """Stop a rank that has entered train_func, if a terminal waits for it."""
        if rank in self._debuggers:
            self._break_in(rank)

    def rank_ended(self, rank: int, why: str = "") -> None:
        """Disconnect the terminal of a rank that has ended."""
        if rank in self._debuggers:
            why = why or f"rank {rank} has ended"
            self._debuggers[rank].show(wire.DebuggerClosed(attempt=self._attempt, rank=rank, why=why))
            self._forget(rank)

    def _forget(self, rank: int) -> None:
        debugger = self._debuggers.pop(rank)
        if debugger.terminal is not None:
            debugger.terminal.close()
        self._on_change()

    def _break_in(self, rank: int) -> None:
        self._send(wire.BreakIn(attempt=self._attempt, rank=rank))

    def _answer(self, rank: int, line: str) -> None:
        self._debuggers[rank].prompt = None
        self._on_change()
        self._send(wire.DebuggerInput(attempt=self._attempt, rank=rank, line=line))

    # -- terminals ------------------------------------------------------------------------------------------------

    def connect(self, reply: Callable[[str], None], argument: str) -> None:
        """Connect a ``distrain debug`` to a rank, and stop that. Reply why this is not possible, or with no text.

        argument: the rank, and the token of the socket.
        """
        number, _, token = argument.partition(" ")
        rank = int(number) if number.isdecimal() else -1
        problem = self._problem(rank)
        if not problem and token.isalnum():
            try:
                fd = connect_to(self._paths.debugger(token)).detach()
            except OSError as error:
                problem = f"the debugger cannot be connected: {error}"
            else:
                self._serve(rank, Channel(fd, fd))
        reply(problem)

    def _problem(self, rank: int) -> str:
        ranks = self._status.ranks
        if not ranks:
            return "no worker has started yet"
        if not 0 <= rank < len(ranks):
            return f"there is no rank {rank}; the run has {count(len(ranks), 'worker')}, from 0"
        if ranks[rank].ended:
            return f"rank {rank} has ended"
        if rank in self._debuggers and self._debuggers[rank].terminal is not None:
            return f"another `distrain debug` has rank {rank}"
        return ""

    def _serve(self, rank: int, terminal: Channel) -> None:
        debugger = self._debuggers.setdefault(rank, _Debugger())
        debugger.terminal = terminal
        terminal.attach(self._loop, partial(self._on_frames, rank, terminal))
        if debugger.unseen:
            terminal.queue(wire.DebuggerOutput(attempt=self._attempt, rank=rank, body=debugger.unseen))
            debugger.unseen = b""
        self._own_terminal.is_connected = True
        if debugger.prompt is not None:
            terminal.queue(debugger.prompt)
        elif self._status.ranks[rank].begun is not None:
            self._break_in(rank)

    def _on_frames(self, rank: int, terminal: Channel, frames: list[wire.Frame]) -> None:
        debugger = self._debuggers.get(rank)
        if debugger is None or debugger.terminal is not terminal:
            terminal.close()
            return
        messages = [_understood(frame) for frame in frames]
        for message in messages:
            match message:
                case wire.DebuggerInput(line=line) if debugger.prompt is not None:
                    self._answer(rank, line)
                case wire.BreakIn() if debugger.prompt is None:
                    self._break_in(rank)
        if not messages or None in messages:  # it was closed, or is one of another version of distrain
            terminal.close()
            debugger.terminal = None
            if debugger.prompt is not None:
                self._answer(rank, "")

    def _find_terminal(self, prompt: wire.DebuggerPrompt) -> None:
        """Find somebody who answers a rank that has reached a breakpoint, or a breakpoint of a lost terminal."""
        rank = prompt.rank
        if rank != self._debug_rank:
            self._answer(rank, "")
        elif not self._own_terminal.open(self._run, rank):
            self._ask_for_terminal(prompt)

    def _ask_for_terminal(self, prompt: wire.DebuggerPrompt) -> None:
        where = f" in {prompt.place}" if prompt.place else ""
        what = f"has raised {prompt.error}" if prompt.error else "has stopped"
        command = f"distrain debug {shlex.quote(self._run)} -r {prompt.rank}"
        say(f"rank {prompt.rank} {what}{where}, and waits for you; open pdb with: {command}")

    def _own_terminal_ended(self, *, was_connected: bool) -> None:
        """Find a terminal for a rank that has reached its next breakpoint before the last terminal was free."""
        for debugger in self._debuggers.values():
            if debugger.prompt is not None and debugger.terminal is None:
                (self._find_terminal if was_connected else self._ask_for_terminal)(debugger.prompt)


class OwnTerminal:
    """The terminal of this process, used by a ``distrain debug`` for a while."""

    def __init__(self, loop: Loop, observers: Observers, on_end: Callable[..., None]) -> None:
        self.is_connected = False
        """True once the ``distrain debug`` has connected to its rank."""
        self._loop = loop
        self._observers = observers
        self._on_end = on_end
        self._child: process.Process | None = None
        self._pidfd = -1

    def open(self, run: str, rank: int) -> bool:
        """Let the user debug a rank here. Return False if this process is not in the foreground of a terminal."""
        if self._child is not None:
            return True
        if not _is_in_foreground():
            return False
        self._observers.tell(TerminalLent(True))
        try:
            self._child = process.spawn_in_terminal(process.bootstrap_argv("debug", run, "-r", str(rank)))
        except OSError:
            self._observers.tell(TerminalLent(False))
            return False
        self.is_connected = False
        self._pidfd = process.open_pidfd(self._child.pid)
        self._loop.on_readable(self._pidfd, self._ended)
        return True

    def _ended(self) -> None:
        self.close()
        self._on_end(was_connected=self.is_connected)

    def close(self) -> None:
        """Wait for the end of ``distrain debug``, which follows that of its connection, and take the terminal back."""
        child, self._child = self._child, None
        if child is None:
            return
        self._loop.forget(self._pidfd)
        os.close(self._pidfd)
        if self.is_connected:  # else it may be waiting for this process
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_TERMINAL_TIMEOUT_S)
        child.kill()  # harmless if it has ended
        process.reap(child)
        process.take_terminal()
        self._observers.tell(TerminalLent(False))


def _is_in_foreground() -> bool:
    try:
        is_terminal = os.isatty(0) and os.isatty(1) and os.isatty(2)
        return is_terminal and process.has_pidfds() and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _understood(frame: wire.Frame) -> wire.Message | None:
    """Return the message in a frame, None if it is none of this version of distrain."""
    try:
        return frame.message()
    except Exception:
        return None

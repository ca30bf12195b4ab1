"""A person with ``distrain debug``, and what the debugger of a rank does, as far as the engine sees it."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distrain import wire
from tests.simulation.world import Process

if TYPE_CHECKING:
    from pathlib import Path

    from tests.simulation.play import Life, Play
    from tests.simulation.worker import SimulatedRank

_POLL_S = 0.1


@dataclass
class Person:
    """Somebody who opens pdb on a rank, looks around for some seconds, and then lets it continue, or just leaves."""

    play: Play
    life: Life
    rank: int
    path: Path
    looks_s: float
    leaves: bool
    decoder: wire.Decoder = field(default_factory=wire.Decoder)

    def begin(self) -> None:
        """Listen at ``path``, to which the coordinator connects."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._listener.setblocking(False)
        Process(self.play.world, "distrain debug").start(self._run, is_main=True)

    def _run(self) -> None:
        world = self.play.world
        with self._listener:
            for _ in range(100):
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    world.sleep(_POLL_S)
                else:
                    break
            else:
                return
        self._close_with_coordinator()
        with connection:
            connection.setblocking(False)
            self._debug(connection)
        if self.life.process.is_alive:
            self.life.process.loop.look()  # type: ignore[attr-defined]

    def _debug(self, connection: socket.socket) -> None:
        while self.life.process.is_alive:
            self.play.world.sleep(_POLL_S)
            try:
                data = connection.recv(1 << 16)
            except BlockingIOError:
                continue
            said = [frame.message() for frame in self.decoder.feed(data)] if data else []
            if not data or any(one.closed is not None for one in said if isinstance(one, wire.DebuggerSays)):
                return
            self.play.world.sleep(self.looks_s)
            if self.leaves:
                return
            with contextlib.suppress(BrokenPipeError):  # the run has ended meanwhile
                connection.sendall(wire.encode(wire.DebuggerInput(attempt=0, rank=self.rank, body=b"continue")))
            self.life.process.loop.look()  # type: ignore[attr-defined]

    def _close_with_coordinator(self) -> None:
        """Close the coordinator's end when its process dies, as the kernel does."""
        watched = self.life.process.loop._watched  # type: ignore[attr-defined]
        ends = [fd for fd in watched if stat.S_ISSOCK(os.fstat(fd).st_mode)]
        self.life.process.at_death.append(lambda: [os.close(fd) for fd in ends if watched.pop(fd, None)])


@dataclass
class Debugger:
    """The debugger of a rank: it stops the main thread where that runs Python, and waits for what a person types."""

    rank: SimulatedRank
    is_due: bool = False
    typed: list[bytes] = field(default_factory=list)

    def hear(self, message: wire.DebuggerInput) -> None:
        """Take what the coordinator sends."""
        if message.opens:
            self.is_due = True
        else:
            self.typed.append(message.body)

    def stop_if_due(self) -> None:
        """Stop the main thread here."""
        if not self.is_due:
            return
        session, world = self.rank.session, self.rank.world
        self.is_due = False
        self.typed.clear()
        began = world.now
        try:
            session.send(wire.DebuggerSays, stopped="has stopped in train.py:1")
            session.wait_until(lambda: self.typed)
            session.send(wire.DebuggerSays, closed="")
        finally:
            self.rank.play.debugged.append((began, world.now))

"""A person with ``distrain debug``, and what the debugger of a rank does, as far as the engine sees it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain import wire
from tests.simulation.world import Process

if TYPE_CHECKING:
    from distrain.wire.channel import Channel
    from tests.simulation.play import Life, Play
    from tests.simulation.worker import SimulatedRank

_POLL_S = 0.1


@dataclass
class Person:
    """Somebody who opens pdb on a rank, looks around for some seconds, and then lets it continue, or just leaves."""

    play: Play
    life: Life
    rank: int
    channel: Channel
    looks_s: float
    leaves: bool

    def begin(self) -> None:
        """Wait for what the coordinator says on ``channel``, which has asked for pdb."""
        Process(self.play.world, "distrain debug").start(self._run, is_main=True)

    def _run(self) -> None:
        with contextlib.closing(self.channel):
            self._debug()
        if self.life.process.is_alive:
            self.life.process.loop.look()  # type: ignore[attr-defined]

    def _debug(self) -> None:
        while self.life.process.is_alive:
            self.play.world.sleep(_POLL_S)
            said: list[Any] = [frame.message() for frame in self.channel.receive()]
            if self.channel.at_end or any(getattr(one, "closed", "refused") is not None for one in said):
                return
            if not said:
                continue
            self.play.world.sleep(self.looks_s)
            if self.leaves:
                return
            with contextlib.suppress(BrokenPipeError):  # the run has ended meanwhile
                self.channel.send(wire.Ask(attempt=0, rank=self.rank, what="typed", body=b"continue"))
            self.life.process.loop.look()  # type: ignore[attr-defined]


@dataclass
class Debugger:
    """The debugger of a rank: it stops the main thread where that runs Python, and waits for what a person types."""

    rank: SimulatedRank
    is_due: bool = False
    typed: list[bytes] = field(default_factory=list)

    def open(self, _: wire.Ask) -> None:
        """Stop the main thread as soon as it runs Python."""
        self.is_due = True

    def receive(self, asked: wire.Ask) -> None:
        """Take what a person has typed."""
        self.typed.append(asked.body)

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

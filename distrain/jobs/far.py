"""The waiter's end of a :mod:`~distrain.jobs.side`. Runs in: waiter."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.coordinator.connection.agent_link import side_argv
from distrain.errors import LaunchError
from distrain.transfer.program import parcel
from distrain.wire.child_link import ChildLink

if TYPE_CHECKING:
    from distrain.coordinator.connection.transport import Transport

_PATIENCE_S = 30.0
"""Seconds that a host has for an answer, the time to connect included."""


class Far:
    """A connection to a host. label: of the claims there."""

    def __init__(self, transport: Transport, label: str) -> None:
        self.name = transport.host.name
        self._child = ChildLink(side_argv(transport, label), greeting=True)
        self._has_greeted = False

    def beat(self) -> None:
        """Send a sign of life, so that the claims there last. May be called in another thread."""
        if self._has_greeted:
            with suppress(OSError):
                self._child.channel.send(wire.Ping())

    def ask(self, what: str, **arguments: Any) -> Any:
        """Have a method of the side called, and return its result. Raise LaunchError if the host does not answer."""
        with suppress(OSError):
            deadline = time.monotonic() + _PATIENCE_S
            while not self._has_greeted:
                self._has_greeted = self._next(deadline).kind == wire.Ping.__name__
            self._child.channel.send(wire.Ask(attempt=0, rank=0, what=what, body=json.dumps(arguments).encode()))
            return self._result(self._next(deadline).message())
        raise self._silent()

    def _next(self, deadline: float) -> wire.Frame:
        """Return the next message. If the host needs distrain, send it first."""
        channel = self._child.channel
        while frames := channel.wait(deadline - time.monotonic()):
            if frames[0].kind != wire.AskForProgram.__name__:
                return frames[0]
            channel.decoder.await_greeting()
            channel.send(parcel())
        raise self._silent()

    def _silent(self) -> LaunchError:
        said = self._child.stray().decode(errors="replace").strip().splitlines()[-3:]
        self.close()  # a late answer must not be taken for that to another request
        return LaunchError(f"{self.name} does not answer{': ' if said else ''}{' / '.join(said)}")

    def _result(self, answer: wire.Message) -> Any:
        assert isinstance(answer, wire.OrderDone)
        if answer.failed is not None:
            raise LaunchError(f"{self.name}: {answer.failed}")
        return json.loads(answer.body)

    @property
    def is_lost(self) -> bool:
        """True if the host can't answer any more."""
        return self._child.channel.at_end or self._child.process.poll() is not None

    def close(self) -> None:
        """End the side."""
        self._child.kill()

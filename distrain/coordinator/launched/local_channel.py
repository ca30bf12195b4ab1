"""A worker's connection to a report handler in the same process. Runs in: coordinator (without workers)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from distrain import wire

if TYPE_CHECKING:
    from collections.abc import Callable

_IDLE_S = 1.0
"""Seconds of other work while the worker waits, before it looks for messages again."""


class InProcessChannel:
    """A worker's connection within one process: what the worker sends is handled, and answered, at once."""

    at_end = False
    has_uploader = False

    def __init__(self) -> None:
        self.uses_should_stop = False
        """True if train_func calls should_stop()."""
        self.stop_reason: str | None = None
        """The signal for which should_stop() becomes true."""
        self.handle: Callable[[wire.FromWorker], None] = lambda message: None
        self.idle: Callable[[float], None] = lambda timeout_s: None
        """Does other work, for this many seconds at most, while the worker waits."""
        self._decoder = wire.Decoder()
        self._answers: deque[wire.Frame] = deque()

    def send(self, message: wire.FromWorker) -> None:
        """Handle a message of the worker."""
        self.handle(message)

    def answer(self, message: wire.ToWorker) -> None:
        """Let the worker receive a message."""
        self._answers += self._decoder.feed(wire.encode(message))

    def receive(self) -> list[wire.Frame]:
        """Return the messages for the worker."""
        frames = list(self._answers)
        self._answers.clear()
        return frames

    def wait(self, timeout_s: float | None = None) -> list[wire.Frame]:
        """Return the messages for the worker; if there are none yet, ``idle`` may cause some."""
        if not self._answers:
            self.idle(_IDLE_S if timeout_s is None else min(timeout_s, _IDLE_S))
        return self.receive()

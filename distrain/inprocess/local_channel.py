"""A worker's line to a ledger in the same process. Runs in: coordinator (without workers)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from distrain import wire

if TYPE_CHECKING:
    from collections.abc import Callable

_IDLE_S = 1.0


class InProcessChannel:
    """A worker's line to the ledger of the same process: what it sends is heard, and answered, at once."""

    at_end = False
    uploads = False
    acknowledges = False

    def __init__(self) -> None:
        self.listens = False
        """Whether train_func calls should_stop()."""
        self.stop_asked: str | None = None
        self.hear: Callable[[wire.FromWorker], None] = lambda message: None
        self.idle: Callable[[float], None] = lambda timeout_s: None
        """Does for some seconds at most what else there is to be done, while the worker waits."""
        self._decoder = wire.Decoder()
        self._answers: deque[wire.Frame] = deque()

    def send(self, message: wire.FromWorker) -> None:
        self.hear(message)

    def answer(self, message: wire.ToWorker) -> None:
        self._answers += self._decoder.feed(wire.encode(message))

    def receive(self) -> list[wire.Frame]:
        frames = list(self._answers)
        self._answers.clear()
        return frames

    def wait(self, timeout_s: float | None = None) -> list[wire.Frame]:
        """Nothing comes by itself, but from what ``idle`` does meanwhile."""
        if not self._answers:
            self.idle(_IDLE_S if timeout_s is None else min(timeout_s, _IDLE_S))
        return self.receive()

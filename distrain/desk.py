"""A worker's line to a ledger in the same process. Runs in: coordinator (without workers)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from distrain import wire

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Desk"]


class Desk:
    """A worker's line to the ledger of the same process: what it sends is heard, and answered, at once."""

    at_end = False
    uploads = False

    def __init__(self) -> None:
        self.listens = False
        """Whether train_func calls should_stop()."""
        self.stop_asked: str | None = None
        self.hear: Callable[[wire.FromWorker], None] = lambda message: None
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

    wait = receive

"""At which call of should_stop() all ranks stop. Runs in: coordinator.

Pure: no I/O; ``now`` (time.monotonic seconds) is an argument.

Once the run is to end, every rank that calls should_stop() says which of its calls it is in, and waits there. When all
have, the highest call is where they stop: whoever is behind gets there without those who wait, as they have done
everything that comes before. A rank that had left its call before it was asked may wait in a collective of the next
step for those who wait here; so after a while they are sent on, to meet at the next call.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE_S = 1.0
"""For all ranks to come to the same call. Doubled each time, as steps may be that uneven."""


@dataclass(frozen=True, slots=True)
class Order:
    """Tell these ranks to go on to this call: to stop there, if ``final``, or to say again that they are there."""

    ranks: tuple[int, ...]
    call: int
    final: bool


class StopConsensus:
    """One attempt."""

    def __init__(self) -> None:
        self.listeners: set[int] = set()
        self.deadline: float | None = None
        """When :meth:`tick` has something to say if nothing else happens."""
        self._votes: dict[int, int] = {}
        self._asked = False
        self._next_call = 0
        self._stop_at: int | None = None
        self._patience_s = PATIENCE_S

    def listen(self, rank: int) -> set[int]:
        """The rank calls should_stop(). Returns the ranks to ask now."""
        self.listeners.add(rank)
        return {rank} if self._asked else set()

    def ask(self) -> set[int]:
        """The run is to end. Returns the ranks to ask now."""
        self._asked = True
        return set(self.listeners)

    def vote(self, rank: int, call: int, now: float) -> list[Order]:
        """The rank waits in this call."""
        if self._stop_at is not None:
            return [Order((rank,), self._stop_at, final=True)]
        if call < self._next_call:
            return [Order((rank,), self._next_call, final=False)]
        self._votes[rank] = call
        self.deadline = self.deadline or now + self._patience_s
        return self._settle()

    def finished(self, rank: int) -> list[Order]:
        """The rank will not call it any more."""
        self.listeners.discard(rank)
        self._votes.pop(rank, None)
        if not self._votes:
            self.deadline = None
        return self._settle()

    def tick(self, now: float) -> list[Order]:
        """Send those who wait on, if the others do not come."""
        if self.deadline is None or now < self.deadline or not self._votes:
            return []
        self._next_call = max(self._votes.values()) + 1
        order = Order(tuple(sorted(self._votes)), self._next_call, final=False)
        self._votes.clear()
        self.deadline = None
        self._patience_s *= 2
        return [order]

    def _settle(self) -> list[Order]:
        if self._stop_at is not None or not self._votes or self.listeners - self._votes.keys():
            return []
        self._stop_at = max(self._votes.values())
        self.deadline = None
        return [Order(tuple(sorted(self.listeners)), self._stop_at, final=True)]

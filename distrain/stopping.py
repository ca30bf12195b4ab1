"""At which call of should_stop() all ranks stop. Runs in: coordinator.

Pure. Every rank that calls should_stop() is asked for the number of the call that it is in, and waits there. The
highest number is where all stop: nobody has gone beyond it, and whoever is behind gets there without those who wait, as
they have done everything that comes before.
"""

from __future__ import annotations

__all__ = ["StopVotes"]


class StopVotes:
    """One attempt."""

    def __init__(self) -> None:
        self.listeners: set[int] = set()
        self._votes: dict[int, int] = {}
        self._asked = False
        self._stop_at: int | None = None

    def listen(self, rank: int) -> set[int]:
        """The rank calls should_stop(). Returns the ranks to ask now."""
        self.listeners.add(rank)
        return {rank} if self._asked else set()

    def ask(self) -> set[int]:
        """The run is to end. Returns the ranks to ask now."""
        self._asked = True
        return set(self.listeners)

    def vote(self, rank: int, call: int) -> int | None:
        """The rank waits in this call. Returns the call at which all stop, once that is clear."""
        self._votes[rank] = call
        return self._decision()

    def finished(self, rank: int) -> int | None:
        """The rank will not call it any more."""
        self.listeners.discard(rank)
        self._votes.pop(rank, None)
        return self._decision()

    def _decision(self) -> int | None:
        if self._stop_at is None and self._votes and not self.listeners - self._votes.keys():
            self._stop_at = max(self._votes.values())
        return self._stop_at

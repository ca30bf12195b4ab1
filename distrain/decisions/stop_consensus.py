"""The agreement of all ranks on the call of should_stop() at which they stop. Runs in: coordinator.

Pure: no I/O; ``now`` (time.monotonic seconds) is an argument.

When the run should end, every rank that calls should_stop() votes: it sends the number of its current call, and waits.
Once all have voted, the highest call is where all ranks stop. A rank that is behind gets there without the waiting
ranks, because they have done everything that comes before.

A rank may have left its call just before it was asked to vote. It may then wait in a collective of the next step for
ranks that wait in should_stop(). Therefore, after some seconds, the waiting ranks continue, and all vote again at the
next call.
"""

from __future__ import annotations

from dataclasses import dataclass

VOTE_TIMEOUT_S = 1.0
"""Seconds to wait for the votes of all ranks before those that wait continue.

The time doubles with every round of votes, because steps may take longer than that."""


@dataclass(frozen=True, slots=True)
class StopOrder:
    """An order to ranks that call should_stop().

    call: number of the call up to which the ranks continue; 0 for none.
    final: the ranks stop at that call; otherwise they vote there, or in a later one.
    """

    ranks: tuple[int, ...]
    call: int = 0
    final: bool = False


class StopConsensus:
    """The votes of one attempt."""

    def __init__(self) -> None:
        self.callers: set[int] = set()
        """The ranks that call should_stop() and have not finished."""
        self.deadline: float | None = None
        """When :meth:`tick` must be called if nothing else happens before."""
        self._votes: dict[int, int] = {}
        self._stop_requested = False
        self._next_call = 0
        self._stop_at: int | None = None
        self._timeout_s = VOTE_TIMEOUT_S

    def request_stop(self) -> list[StopOrder]:
        """Note that the run should end: the ranks have to vote now."""
        self._stop_requested = True
        return [StopOrder(tuple(sorted(self.callers)))]

    def vote(self, rank: int, call: int, now: float) -> list[StopOrder]:
        """Count the vote of a rank, which waits in this call. With 0, only note that the rank calls should_stop()."""
        if not call:
            self.callers.add(rank)
            return [StopOrder((rank,))] if self._stop_requested else []
        if self._stop_at is not None:
            return [StopOrder((rank,), self._stop_at, final=True)]
        if call < self._next_call:
            return [StopOrder((rank,), self._next_call)]
        self._votes[rank] = call
        self.deadline = self.deadline or now + self._timeout_s
        return self._decide()

    def mark_finished(self, rank: int) -> list[StopOrder]:
        """Note that the rank has finished and will vote no more."""
        self.callers.discard(rank)
        self._votes.pop(rank, None)
        if not self._votes:
            self.deadline = None
        return self._decide()

    def tick(self, now: float) -> list[StopOrder]:
        """Let the waiting ranks continue if the votes of the others are late."""
        if self.deadline is None or now < self.deadline or not self._votes:
            return []
        self._next_call = max(self._votes.values()) + 1
        order = StopOrder(tuple(sorted(self._votes)), self._next_call)
        self._votes.clear()
        self.deadline = None
        self._timeout_s *= 2
        return [order]

    def _decide(self) -> list[StopOrder]:
        if self._stop_at is not None or not self._votes or self.callers - self._votes.keys():
            return []
        self._stop_at = max(self._votes.values())
        self.deadline = None
        return [StopOrder(tuple(sorted(self.callers)), self._stop_at, final=True)]

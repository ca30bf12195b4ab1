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

import math
from typing import TYPE_CHECKING

from distrain import wire

if TYPE_CHECKING:
    from collections.abc import Iterable

VOTE_TIMEOUT_S = 1.0
"""Seconds to wait for the votes of all ranks before those that wait continue.

The time doubles with every round of votes, because steps may take longer than that."""


class StopConsensus:
    """The votes of one attempt."""

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt
        self.callers: set[int] = set()
        """The ranks that call should_stop() and have not finished."""
        self.deadline = math.inf
        """When :meth:`tick` must be called if nothing else happens before; infinite if it need not be."""
        self._votes: dict[int, int] = {}
        self._stop_requested = False
        self._next_call = 0
        self._stop_at: int | None = None
        self._timeout_s = VOTE_TIMEOUT_S

    def request_stop(self) -> list[wire.StopDecision]:
        """Note that the run should end: the ranks have to vote now."""
        self._stop_requested = True
        return self._orders(self.callers)

    def vote(self, rank: int, call: int, now: float) -> list[wire.StopDecision]:
        """Count the vote of a rank, which waits in this call. With 0, only note that the rank calls should_stop()."""
        if not call:
            self.callers.add(rank)
            return self._orders([rank]) if self._stop_requested else []
        if self._stop_at is not None:
            return self._orders([rank], self._stop_at, final=True)
        if call < self._next_call:
            return self._orders([rank], self._next_call)
        self._votes[rank] = call
        self.deadline = min(self.deadline, now + self._timeout_s)
        return self._decide()

    def mark_finished(self, rank: int) -> list[wire.StopDecision]:
        """Note that the rank has finished and will vote no more."""
        self.callers.discard(rank)
        self._votes.pop(rank, None)
        if not self._votes:
            self.deadline = math.inf
        return self._decide()

    def tick(self, now: float) -> list[wire.StopDecision]:
        """Let the waiting ranks continue if the votes of the others are late."""
        if now < self.deadline or not self._votes:
            return []
        self._next_call = max(self._votes.values()) + 1
        orders = self._orders(self._votes, self._next_call)
        self._votes.clear()
        self.deadline = math.inf
        self._timeout_s *= 2
        return orders

    def _decide(self) -> list[wire.StopDecision]:
        if self._stop_at is not None or not self._votes or self.callers - self._votes.keys():
            return []
        self._stop_at = max(self._votes.values())
        self.deadline = math.inf
        return self._orders(self.callers, self._stop_at, final=True)

    def _orders(self, ranks: Iterable[int], call: int = 0, *, final: bool = False) -> list[wire.StopDecision]:
        return [wire.StopDecision(attempt=self._attempt, rank=one, call=call, final=final) for one in sorted(ranks)]

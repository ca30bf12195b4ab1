"""Ranks that meet in barrier() and other collectives: which rank waits for which. Runs in: coordinator.

Pure: no I/O; ``now`` (time.monotonic seconds) is an argument. The n-th collective of a rank in an attempt pairs with
the n-th of every other rank, and all must be the same operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain import wire
from distrain.system.text import name_ranks, ranks_have

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclass(frozen=True, slots=True)
class _Call:
    index: int
    operation: str
    asked: wire.CollectiveEntered
    since: float
    until: float


class BarrierTracker:
    """The collectives of one attempt."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._waiting: dict[int, _Call] = {}
        """By rank. Between two events, all of them are the same call: index and operation."""
        self.deadline = math.inf
        """When the first timeout of a waiting rank is over, so that :meth:`tick` has something to do."""
        self._finished: set[int] = set()
        self._refused: dict[int, str] = {}
        """By index of the call: why it failed on some rank, and fails on the ranks that make it later."""

    @property
    def waiting(self) -> Collection[int]:
        """The ranks that wait for others in a collective."""
        return self._waiting.keys()

    def entered(self, asked: wire.CollectiveEntered, now: float) -> Sequence[wire.Answer]:
        """Note that a rank waits in a collective.

        All ranks get the data of rank 0; if the collective gathers, that of all ranks as lines, in their order.
        """
        rank, index = asked.rank, asked.index
        abandoned = self._abandon_call(rank)
        if index in self._refused:
            return [*abandoned, _answer(asked, b"", self._refused[index])]
        until = math.inf if asked.timeout_s is None else now + asked.timeout_s
        call = _Call(index, asked.operation, asked, now, until)
        other = next(iter(self._waiting.values()), call)
        self._waiting[rank] = call
        self.deadline = min(self.deadline, call.until)
        if self._finished or (other.index, other.operation) != (index, call.operation):
            return [*abandoned, *self._refuse_calls()]
        if len(self._waiting) == self._world_size:
            senders = range(self._world_size) if asked.gathers else (0,)
            return self._end_calls(index, data=b"\n".join(self._waiting[sender].asked.body for sender in senders))
        return abandoned

    def finished(self, rank: int) -> Sequence[wire.Answer]:
        """Note that the rank has done its work and will make no further call."""
        self._finished.add(rank)
        abandoned = self._abandon_call(rank)
        return [*abandoned, *(self._refuse_calls() if self._waiting else [])]

    def tick(self, now: float) -> Sequence[wire.Answer]:
        """End the calls whose timeout is over."""
        if now < self.deadline:
            return []
        call = min(self._waiting.values(), key=lambda call: call.until)
        missing = [rank for rank in range(self._world_size) if rank not in self._waiting]
        within_s = call.until - call.since
        return self._refuse(call.index, f"{ranks_have(missing)} not come to {call.operation} within {within_s:g} s")

    def _abandon_call(self, rank: int) -> list[wire.Answer]:
        """End the call in which the rank seems to wait: an exception took it out, so it is never complete."""
        call = self._waiting.pop(rank, None)
        return [] if call is None else self._refuse(call.index, _gave_up([rank], call))

    def _refuse_calls(self) -> list[wire.Answer]:
        """End the calls that can never be complete."""
        call = min(self._waiting.values(), key=lambda call: call.index)
        # An exception took those that are ahead out of it.
        ahead = [rank for rank, other in self._waiting.items() if other.index > call.index]
        return self._refuse(call.index, _gave_up(ahead, call) if ahead else self._impossible(call.index))

    def _impossible(self, index: int) -> str:
        """Return why the waiting ranks cannot meet any more."""
        ranks_of: dict[str, list[int]] = {}
        for rank, call in sorted(self._waiting.items()):
            ranks_of.setdefault(call.operation, []).append(rank)
        if len(ranks_of) > 1:
            calls = ", ".join(f"{name_ranks(ranks)} called {name}" for name, ranks in ranks_of.items())
            return f"call number {index} is not the same collective on all ranks: {calls}"
        return (
            f"{name_ranks(self._finished)} finished train_func without calling {next(iter(ranks_of))}, in "
            f"which {ranks_have(self._waiting)} waited (call number {index}); every rank must call it"
        )

    def _refuse(self, index: int, why: str) -> list[wire.Answer]:
        self._refused[index] = why
        return self._end_calls(index, refused=why)

    def _end_calls(self, index: int, data: bytes = b"", refused: str | None = None) -> list[wire.Answer]:
        """End the call ``index`` on every rank that waits in it; ranks in a later call keep waiting."""
        ended = [self._waiting.pop(rank) for rank, call in sorted(self._waiting.items()) if call.index == index]
        self.deadline = min((call.until for call in self._waiting.values()), default=math.inf)
        return [_answer(call.asked, data, refused) for call in ended]


def _answer(asked: wire.Question, data: bytes, refused: str | None) -> wire.Answer:
    return wire.Answer(attempt=asked.attempt, rank=asked.rank, question=asked.question, body=data, failed=refused)


def _gave_up(ranks: Sequence[int], call: _Call) -> str:
    return f"{name_ranks(ranks)} gave up waiting in {call.operation}, call number {call.index}, and continued"

"""Ranks that meet in barrier() and broadcast_from_rank_zero(): who waits for whom. Runs in: coordinator.

Pure: no I/O; ``now`` (time.monotonic seconds) is an argument. The n-th collective of a rank in an attempt pairs with
the n-th of every other rank, and all must be the same operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain.decisions.failures import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable

WARN_AFTER_S = 60.0
"""How long ranks wait before the user hears whom they are waiting for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Let ``rank`` go on with rank 0's ``data``; or, with ``refused``, make its call fail."""

    rank: int
    index: int
    data: bytes = b""
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Late:
    """One line for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class _Call:
    index: int
    operation: str
    data: bytes
    since: float
    until: float


class BarrierTracker:
    """The collectives of one attempt."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._waiting: dict[int, _Call] = {}
        self._finished: set[int] = set()
        self._refused: dict[int, str] = {}  # by index; who comes later hears the same
        self._warned_of = 0

    def joined(
        self, rank: int, index: int, operation: str, data: bytes, now: float, timeout_s: float | None = None
    ) -> list[Answer]:
        """The rank waits in its ``index``-th collective, for ``timeout_s`` at most."""
        if index in self._refused:
            return [Answer(rank, index, refused=self._refused[index])]
        until = math.inf if timeout_s is None else now + timeout_s
        self._waiting[rank] = _Call(index, operation, data, now, until)
        return self._settle()

    def finished(self, rank: int) -> list[Answer]:
        """The rank has done its work and will not come any more."""
        self._finished.add(rank)
        return self._settle()

    def tick(self, now: float) -> list[Answer | Late]:
        """Who has been waiting for long, and for whom; said once for each collective. Who has waited for its
        ``timeout_s`` does not wait any more.
        """
        over = [(call.index, rank) for rank, call in self._waiting.items() if call.until <= now]
        if over:
            index, rank = min(over)
            call = self._waiting[rank]
            why = (
                f"rank(s) {rank_list(self._missing())} have not come to {call.operation} within "
                f"{call.until - call.since:g} s"
            )
            self._refused[index] = why
            return [*self._answer(index, refused=why)]
        waiting = self._unmentioned()
        if not waiting or now < min(call.since for call in waiting) + WARN_AFTER_S:
            return []
        call = next(iter(self._waiting.values()))
        self._warned_of = call.index
        return [
            Late(
                f"rank(s) {rank_list(self._waiting)} have been waiting in {call.operation} for {WARN_AFTER_S:g} s; "
                f"rank(s) {rank_list(self._missing())} have not called it yet"
            )
        ]

    def deadline(self) -> float | None:
        """When :meth:`tick` has something to do if nothing else happens."""
        moments = [call.since + WARN_AFTER_S for call in self._unmentioned()]
        moments += [call.until for call in self._waiting.values() if call.until < math.inf]
        return min(moments, default=None)

    def _unmentioned(self) -> list[_Call]:
        return [call for call in self._waiting.values() if call.index > self._warned_of]

    def _missing(self) -> Iterable[int]:
        return [rank for rank in range(self._world_size) if rank not in self._waiting]

    def _settle(self) -> list[Answer]:
        if not self._waiting:
            return []
        ahead = max(call.index for call in self._waiting.values())
        index = min(call.index for call in self._waiting.values())
        why = self._given_up(index, ahead) if index < ahead else self._impossible(index)
        if why is not None:
            self._refused[index] = why
            return self._answer(index, refused=why)
        if len(self._waiting) < self._world_size:
            return []
        return self._answer(index, data=self._waiting[0].data)

    def _given_up(self, index: int, ahead: int) -> str:
        """Why ranks that wait in ``index`` wait in vain: an exception took others out of that call."""
        gone = [rank for rank, call in self._waiting.items() if call.index == ahead]
        here = [rank for rank, call in self._waiting.items() if call.index == index]
        operation = self._waiting[here[0]].operation
        return f"rank(s) {rank_list(gone)} gave up waiting in {operation}, call number {index}, and went on without it"

    def _impossible(self, index: int) -> str | None:
        """Why the ranks that wait cannot meet any more."""
        ranks_of: dict[str, list[int]] = {}
        for rank, call in sorted(self._waiting.items()):
            ranks_of.setdefault(call.operation, []).append(rank)
        if len(ranks_of) > 1:
            calls = ", ".join(f"rank(s) {rank_list(ranks)} called {name}" for name, ranks in ranks_of.items())
            return f"the ranks do not meet in the same collective, as their call number {index}: {calls}"
        if self._finished:
            return (
                f"rank(s) {rank_list(self._finished)} finished train_func without calling {next(iter(ranks_of))}, in "
                f"which rank(s) {rank_list(self._waiting)} wait (their call number {index}); every rank must call it"
            )
        return None

    def _answer(self, index: int, data: bytes = b"", refused: str | None = None) -> list[Answer]:
        """Let everybody in ``index`` go; who is ahead goes on waiting."""
        ranks = sorted(rank for rank, call in self._waiting.items() if call.index == index)
        for rank in ranks:
            del self._waiting[rank]
        return [Answer(rank, index, data, refused) for rank in ranks]

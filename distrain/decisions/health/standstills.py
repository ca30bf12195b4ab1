"""Hangs, from the standstills of the ranks. Runs in: coordinator.

A run hangs if every rank stands still and the ranks wait for each other: for one that is stuck, or all in collectives
that do not match. Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distrain.system.stacks import WHY_SILENT
from distrain.system.text import duration, name_ranks, ranks_have

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from distrain import wire

HANG_S = 5.0
"""Seconds for which the ranks have stood still before that is called a hang."""
MUTE_S = 6.0
"""Seconds for which all others have waited before the ranks that say nothing are asked for their stacks."""
_WAITS = ("waits", "blocked")


@dataclass(frozen=True, slots=True)
class Stand:
    """The standstill of a rank.

    state, place: as in :class:`~distrain.wire.Standstill`. since: time.monotonic.
    """

    state: str
    place: str
    since: float

    @property
    def waits(self) -> bool:
        return self.state in _WAITS


@dataclass(frozen=True, slots=True)
class Hang:
    """A hang.

    stuck, waiting: ranks by what they do. If none is stuck, those that wait are in collectives that do not match. mute:
    ranks that do not answer. finished: ranks that others may wait for in vain. since: when the last rank moved.
    """

    stuck: dict[int, Stand]
    waiting: dict[int, Stand]
    mute: Sequence[int] = ()
    finished: Sequence[int] = ()

    @property
    def since(self) -> float:
        return max(stand.since for stand in [*self.stuck.values(), *self.waiting.values()])

    @property
    def culprits(self) -> list[int]:
        """The ranks that others wait for; all if they wait for each other."""
        return sorted({*self.stuck, *self.mute} or self.waiting)

    def text(self, now: float | None = None) -> str:
        """Return a sentence that names the ranks and what they wait for, and for how long until ``now``."""
        places = _by_place(self.waiting)
        time = _until(now, self.since)
        if self.stuck or self.mute:
            them = "it" if len(self.culprits) == 1 else "them"
            waits = [f"{name_ranks(ranks)} {_wait(ranks)} for {them} in {place}" for place, ranks in places.items()]
            return "; ".join([*self._blamed(now), *waits])
        if self.finished:
            where = ", ".join(f"{name_ranks(ranks)} {_wait(ranks)} in {place}" for place, ranks in places.items())
            return f"{ranks_have(self.finished)} finished train_func; {where}{time}"
        if len(places) == 1:
            return f"{ranks_have(list(self.waiting))} been waiting for each other in {next(iter(places))}{time}"
        where = ", ".join(f"{name_ranks(ranks)} in {place}" for place, ranks in places.items())
        return f"all ranks have been waiting for each other{time}: {where}"

    def _blamed(self, now: float | None) -> Iterator[str]:
        for state, verb in (("stuck", "been stuck"), ("loops", "looped without any change")):
            found = {rank: stand for rank, stand in self.stuck.items() if stand.state == state}
            for place, ranks in _by_place(found).items():
                time = _until(now, min(found[rank].since for rank in ranks))
                yield f"{ranks_have(ranks)} {verb} in {place}{time}"
        if self.mute:
            yield f"{name_ranks(self.mute)} {'does' if len(self.mute) == 1 else 'do'} not answer: {WHY_SILENT}"


@dataclass(slots=True)
class Standstills:
    """The ranks of one attempt: which of them stand still."""

    ranks: set[int] = field(default_factory=set)
    """Those that are in train_func."""
    expected: int = 0
    """The number of all ranks."""
    finished: set[int] = field(default_factory=set)
    mute: set[int] = field(default_factory=set)
    """Ranks that did not answer when they were asked for their stacks."""
    _stands: dict[int, Stand] = field(default_factory=dict)
    _ended: float = 0.0
    """When the last rank has ended."""

    def heard(self, message: wire.Standstill, now: float) -> None:
        """Note that a rank stands still, or moves again."""
        self.mute.discard(message.rank)
        if message.state:
            self._stands[message.rank] = Stand(message.state, message.place, now - message.seconds)
        else:
            self._stands.pop(message.rank, None)

    def ended(self, rank: int, now: float, *, ok: bool) -> None:
        """Note that a rank has left train_func."""
        self._ended = now
        self.ranks.discard(rank)
        self.mute.discard(rank)
        self._stands.pop(rank, None)
        if ok:
            self.finished.add(rank)

    def deadline(self) -> float | None:
        """Return when :meth:`hang` or :meth:`unheard` may find something new if no rank moves (time.monotonic)."""
        if len(self.ranks) + len(self.finished) < max(2, self.expected) or not self._stands:
            return None
        newest = max(self._ended, *(stand.since for stand in self._stands.values()))
        return newest + (HANG_S if len(self._stands) + len(self.mute) >= len(self.ranks) else MUTE_S)

    def unheard(self, now: float) -> set[int]:
        """Return the ranks that have said nothing while all others have waited for long."""
        deadline = self.deadline()
        quiet = self.ranks - self._stands.keys() - self.mute
        all_wait = all(stand.waits for stand in self._stands.values())
        is_due = deadline is not None and now >= deadline
        return quiet if is_due and all_wait and len(quiet) <= len(self._stands) else set()

    def hang(self, now: float) -> Hang | None:
        """Return the hang, if there is one now."""
        deadline = self.deadline()
        if deadline is None or now < deadline or self.ranks - self._stands.keys() - self.mute:
            return None
        stuck = {rank: stand for rank, stand in sorted(self._stands.items()) if not stand.waits}
        waiting = {rank: stand for rank, stand in sorted(self._stands.items()) if stand.waits}
        is_deadlock = all(stand.state == "blocked" for stand in waiting.values())
        if not waiting or not (stuck or self.mute or is_deadlock):
            return None
        return Hang(stuck, waiting, sorted(self.mute), () if stuck or self.mute else sorted(self.finished))


def _until(now: float | None, since: float) -> str:
    return "" if now is None else f" for {duration(now - since)}"


def _by_place(stands: Mapping[int, Stand]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for rank, stand in stands.items():
        places.setdefault(stand.place, []).append(rank)
    return places


def _wait(ranks: Collection[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"

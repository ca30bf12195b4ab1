"""Hangs, from the standstills of the ranks. Runs in: coordinator.

A run hangs if every rank stands still and the ranks wait for each other: for one that is stuck, or all in collectives
that do not match. Pure: no I/O, no clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from distrain.decisions.health.collectives import UNKNOWN, Comparison
from distrain.system.stacks import WHY_SILENT
from distrain.system.text import duration, name_ranks, ranks_have

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from distrain import wire

HANG_S = 5.0
"""Seconds for which the ranks have stood still before that is called a hang."""
MUTE_S = 6.0
"""Seconds that all others have waited before the ranks that say nothing are asked where they are."""
_WAITS = ("waits", "blocked", "asks")
_INFERRED = ("mute", "held")
_NO_COLLECTIVE = re.compile(r"recv|send|batch_isend|monitored_barrier|new_|init_|split_|destroy_")
"""Functions of torch.distributed that wait for a single rank, or for the store."""
_VERBS = {"stuck": "been stuck in", "loops": "looped without any change in"}


class Stand(NamedTuple):
    """The state and the place of a rank that stands still, as in :class:`~distrain.wire.Standstill`.

    This module adds two states: ``mute``, the rank does not answer, and ``held``, native code holds its GIL.
    """

    state: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Hang:
    """A hang.

    stuck, waiting: ranks by what they do. If none is stuck, those that wait are in collectives that do not match.
    since: when the last rank moved (time.monotonic). collectives: what the flight recorders show.
    """

    stuck: dict[int, Stand]
    waiting: dict[int, Stand]
    since: float
    collectives: Comparison = UNKNOWN

    @property
    def culprits(self) -> list[int]:
        """The ranks that others wait for; all if they wait for each other."""
        return sorted(self.stuck or self.collectives.culprits or self.waiting)

    @property
    def stranded(self) -> frozenset[tuple[int, str, int]]:
        """The collectives, by rank, group and number, in which a rank can only wait for one that has finished."""
        waits = {rank for rank, stand in self.waiting.items() if not _NO_COLLECTIVE.match(stand.place)}
        return frozenset(one for one in self.collectives.stranded if not self.stuck and one[0] in waits)

    def headline(self, now: float | None = None) -> str:
        """Return one sentence that names the culprits, for places that have room for only one."""
        culprits = [] if self.stuck else self.collectives.sentences[:1]
        return "; ".join([*culprits, self.text(now)])

    def text(self, now: float | None = None) -> str:
        """Return a sentence that names the ranks and what they wait for, and for how long until ``now``."""
        time = "" if now is None else f" for {duration(now - self.since)}"
        waiting = [(name_ranks(ranks), len(ranks), stand.place) for stand, ranks in _alike(self.waiting)]
        if not self.stuck:
            where = ", ".join(f"{ranks} in {place}" for ranks, _, place in waiting)
            return f"all ranks have been waiting for each other{time}: {where}"
        them = "it" if len(self.stuck) == 1 else "them"
        blamed = [_blame(stand, ranks, time) for stand, ranks in _alike(self.stuck)]
        waits = [f"{ranks} wait{'s' * (count == 1)} for {them} in {place}" for ranks, count, place in waiting]
        return "; ".join([*blamed, *waits])


@dataclass(slots=True)
class Standstills:
    """The ranks of one attempt: which of them stand still."""

    ranks: set[int] = field(default_factory=set)
    """Those that are in train_func."""
    expected: int = 0
    """The number of all ranks."""
    finished: set[int] = field(default_factory=set)
    _heard_at: dict[int, float] = field(default_factory=dict)
    """By rank: when it last said whether it stands still."""
    _stands: dict[int, Stand] = field(default_factory=dict)
    _moved_at: float = 0.0
    """When the last rank moved, or ended."""

    def heard(self, message: wire.Standstill, now: float) -> None:
        """Note that a rank stands still, or moves. If it moves, ranks that it waited for may do so, too."""
        if message.state:
            self._stands[message.rank] = Stand(message.state, message.place)
        else:
            self._stands.pop(message.rank, None)
            self._stands = {rank: stand for rank, stand in self._stands.items() if stand.state not in _INFERRED}
        self._heard_at[message.rank] = now
        self._moved_at = max(self._moved_at, now - message.seconds)

    def note_busy(self, ranks: Collection[int], now: float) -> None:
        """Note that ranks did not answer because they are computing. They may be asked again."""
        self._heard_at |= dict.fromkeys(ranks, now)

    def note_held(self, rank: int, place: str) -> None:
        """Note that a rank does nothing, and its threads cannot run. ``place``: that of its main thread."""
        self._stands[rank] = Stand("held", place)

    def note_mute(self, ranks: Collection[int]) -> None:
        """Note that ranks did not answer when they were asked for their stacks."""
        self._stands |= dict.fromkeys(ranks, Stand("mute"))

    def ended(self, rank: int, now: float, *, ok: bool) -> None:
        """Note that a rank has left train_func."""
        self._moved_at = now
        self.ranks.discard(rank)
        self._stands.pop(rank, None)
        if ok:
            self.finished.add(rank)

    @property
    def waiting(self) -> set[int]:
        """The ranks that wait for others, and not for distrain."""
        return {rank for rank, stand in self._stands.items() if stand.state in ("waits", "blocked")}

    @property
    def all_stand(self) -> bool:
        return len(self._stands) >= len(self.ranks)

    @property
    def is_asking(self) -> bool:
        """True while a rank waits for distrain."""
        return any(stand.state == "asks" for stand in self._stands.values())

    def deadline(self) -> float | None:
        """Return when :meth:`hang` or :meth:`unheard` may find something new if no rank moves (time.monotonic)."""
        if len(self.ranks) + len(self.finished) < max(2, self.expected) or not self._stands:
            return None
        if self.all_stand:
            return self._moved_at + HANG_S
        heard_at = min(self._heard_at.get(rank, 0.0) for rank in self.ranks - self._stands.keys())
        return max(self._moved_at, heard_at) + MUTE_S

    def unheard(self, now: float) -> set[int]:
        """Return the ranks that have said nothing while all others have waited for long."""
        quiet = {rank for rank in self.ranks - self._stands.keys() if now >= self._heard_at.get(rank, 0.0) + MUTE_S}
        all_wait = all(stand.state in _WAITS for stand in self._stands.values())
        return quiet if self.is_due(now) and all_wait and len(quiet) <= len(self._stands) else set()

    def hang(self, now: float) -> Hang | None:
        """Return the hang, if there is one now."""
        if not self.is_due(now) or not self.all_stand:
            return None
        stands = sorted(self._stands.items())
        stuck = {rank: stand for rank, stand in stands if stand.state not in _WAITS}
        waiting = {rank: stand for rank, stand in stands if stand.state in _WAITS}
        is_deadlock = all(stand.state == "blocked" for stand in waiting.values())
        return Hang(stuck, waiting, self._moved_at) if waiting and (stuck or is_deadlock) else None

    def is_due(self, now: float) -> bool:
        """Return whether the deadline is over."""
        deadline = self.deadline()
        return deadline is not None and now >= deadline


def _blame(stand: Stand, ranks: Collection[int], time: str) -> str:
    if stand.state == "held":
        return f"{ranks_have(ranks)} been stuck{time} in native code that holds the GIL, {stand.place}"
    if stand.state == "mute":
        return f"{ranks_have(ranks)} not answered{time}: {WHY_SILENT}"
    return f"{ranks_have(ranks)} {_VERBS[stand.state]} {stand.place}{time}"


def _alike(stands: Mapping[int, Stand]) -> list[tuple[Stand, list[int]]]:
    """Return the ranks that do the same."""
    found: dict[Stand, list[int]] = {}
    for rank, stand in stands.items():
        found.setdefault(stand, []).append(rank)
    return list(found.items())

"""The order of the rows in an epoch, and the division of the rows among the ranks. Runs in: worker.

Both are pure functions, so that a run that resumes finds the same rows in the same places, with any number of ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Indices = np.ndarray[Any, np.dtype[np.int64]]

Span = tuple[int, int]
"""Positions in the order of an epoch: from the first one up to, but without, the second one."""

_ROUNDS = 6
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Permutation:
    """A pseudo-random order of the numbers below ``size`` that is computed number by number.

    It needs no memory for its numbers: a balanced Feistel network over the next larger power of four, applied again to
    numbers that fall outside ("cycle walking"; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    ::

        Permutation(5, 0, "a")(np.arange(5))  # the numbers 0 to 4 in another order
    """

    def __init__(self, size: int, *key: object) -> None:
        self._size = size
        self._half = np.uint64(max(1, (max(1, size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8")

    def __call__(self, numbers: Indices) -> Indices:
        """Return the numbers at these places of the order."""
        found = self._shuffle(numbers.astype(np.uint64))
        outside = np.flatnonzero(found >= self._size)
        while outside.size:
            found[outside] = self._shuffle(found[outside])
            outside = outside[found[outside] >= self._size]
        return found.astype(np.int64)

    def _shuffle(self, numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            mixed = (right + key) * _ODD
            mixed ^= mixed >> np.uint64(29)
            mixed *= _ODD
            left, right = right, left ^ ((mixed >> np.uint64(32)) & self._mask)
        joined: np.ndarray[Any, np.dtype[np.uint64]] = (left << self._half) | right
        return joined


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of rows, as the user chooses it.

    shuffled: blocks (row groups, files) come in a new order in each epoch. Rows do, if any row can be found at once.
    window: so many consecutive rows of that order are shuffled in memory; 0: none are.
    """

    shuffled: bool = False
    window: int = 0
    seed: int = 0

    def permutation(self, size: int, epoch: int, *key: object) -> Permutation:
        """Return the permutation that ``key`` names."""
        return Permutation(size, self.seed, epoch, *key)

    def as_json(self) -> dict[str, int]:
        """Return the fields, for a position."""
        return {"shuffled": int(self.shuffled), "window": self.window, "seed": self.seed}


class Division(NamedTuple):
    """Rows that were divided among ranks, and how many of them the ranks have taken.

    Each of ``ranks`` ranks had ``share`` consecutive rows of those that were left. It has taken the first ``taken`` of
    them; a list if the ranks have taken different numbers.
    """

    ranks: int
    share: int
    taken: int | list[int]

    def taken_by(self, rank: int) -> int:
        """Return how many rows this rank has taken."""
        return self.taken if isinstance(self.taken, int) else self.taken[rank]


def rows_left(rows: int, divisions: Iterable[Division]) -> list[Span]:
    """Return the positions that no rank has taken, after these divisions, each of what the one before has left."""
    left: list[Span] = [(0, rows)] if rows else []
    for division in divisions:
        share, total = division.share, length(left)
        gaps = [(rank * share + division.taken_by(rank), (rank + 1) * share) for rank in range(division.ranks)]
        gaps.append((division.ranks * share, total))
        left = [span for start, stop in gaps for span in part(left, start, min(stop, total))]
    return left


def part(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """Yield the spans that hold the places from ``start`` to ``stop`` of the positions in ``spans``."""
    for first, end in spans:
        size = end - first
        if start < min(stop, size):
            yield first + max(0, start), first + min(stop, size)
        start, stop = max(0, start - size), stop - size
        if stop <= 0:
            return


def length(spans: Iterable[Span]) -> int:
    """Return the number of positions."""
    return sum(stop - start for start, stop in spans)

"""Equal lines of several ranks become one line. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 0.2
"""Seconds for which a line waits for the same line of other ranks."""
_MOST_WAITING = 2000
"""Lines that may wait. Ranks that print more than that print too much to be read."""


@dataclass(slots=True)
class FoldedLine:
    """A line that ``ranks`` have printed; the first of them at ``at``.

    kind: the stream (1: stdout, 2: stderr), and the key that lines have in common.
    number: counts the lines.
    """

    text: bytes
    kind: tuple[int, bytes]
    at: float
    number: int
    ranks: set[int] = field(default_factory=set)


class Folding:
    """Lines on their way to the console.

    The lines of each rank keep their order. No line waits longer than :data:`WAIT_S`.

    ranks: the number of ranks. A line that all have printed need not wait.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waiting: deque[FoldedLine] = deque()
        self._newest: dict[tuple[int, bytes], FoldedLine] = {}
        """By kind: the newest line that waits."""
        self._last: dict[int, int] = {}
        """By rank: the number of its last line. It joins only lines after that one, so its lines keep their order."""
        self._count = 0

    def add(self, rank: int, stream: int, text: bytes, now: float, key: bytes | None = None) -> None:
        """Take a line. ``key``: lines with the same key count as equal; by default the text."""
        kind = (stream, text if key is None else key)
        same = self._newest.get(kind)
        if same is None or same.number <= self._last.get(rank, -1):
            same = self._newest[kind] = FoldedLine(text, kind, now, self._count)
            self._count += 1
            self._waiting.append(same)
        same.ranks.add(rank)
        self._last[rank] = same.number

    def take(self, now: float) -> Iterator[FoldedLine]:
        """Remove and yield the lines that need not wait any longer."""
        while self._waiting and (self._is_due(self._waiting[0], now) or len(self._waiting) > _MOST_WAITING):
            yield self._pop()

    def take_all(self) -> Iterator[FoldedLine]:
        while self._waiting:
            yield self._pop()

    def deadline(self) -> float | None:
        """Return when to call :meth:`take`, or None."""
        return self._waiting[0].at + WAIT_S if self._waiting else None

    def _is_due(self, line: FoldedLine, now: float) -> bool:
        return now >= line.at + WAIT_S or len(line.ranks) >= self._ranks

    def _pop(self) -> FoldedLine:
        line = self._waiting.popleft()
        if self._newest[line.kind] is line:
            del self._newest[line.kind]
        return line

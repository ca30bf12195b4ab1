"""Equal lines of several ranks become one line. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 0.2
"""Seconds for which a line waits for the same line of other ranks."""
_NUMBER = attrgetter("number")


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
        self._of_kind: defaultdict[tuple[int, bytes], list[FoldedLine]] = defaultdict(list)
        """By kind: the lines that wait, the oldest first."""
        self._last: dict[int, int] = {}
        """By rank: the number of its last line. It joins only lines after that one, so its lines keep their order."""
        self._count = 0

    def add(self, rank: int, stream: int, text: bytes, now: float, key: bytes | None = None) -> None:
        """Take a line. ``key``: lines with the same key count as equal; by default the text.

        It joins the oldest line that it can: a later one would keep the next lines of the rank from joining those
        between the two.
        """
        kind = (stream, text if key is None else key)
        equal = self._of_kind[kind]
        place = bisect_right(equal, self._last.get(rank, -1), key=_NUMBER)
        line = equal[place] if place < len(equal) else self._append(FoldedLine(text, kind, now, self._count))
        line.ranks.add(rank)
        self._last[rank] = line.number

    def _append(self, line: FoldedLine) -> FoldedLine:
        self._count += 1
        self._waiting.append(line)
        self._of_kind[line.kind].append(line)
        return line

    def take(self, now: float) -> Iterator[FoldedLine]:
        """Remove and yield the lines that need not wait any longer."""
        while self._waiting and self._is_due(self._waiting[0], now):
            line = self._waiting.popleft()
            equal = self._of_kind[line.kind]
            del equal[0]
            if not equal:
                del self._of_kind[line.kind]
            yield line

    def deadline(self) -> float | None:
        """Return when to call :meth:`take`, or None."""
        return self._waiting[0].at + WAIT_S if self._waiting else None

    def _is_due(self, line: FoldedLine, now: float) -> bool:
        return now >= line.at + WAIT_S or len(line.ranks) >= self._ranks

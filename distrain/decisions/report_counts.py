"""How many reports each rank has made, and which rank has made the fewest. Runs in: coordinator.

Pure: no I/O. Every method takes the same time for any number of ranks, as long as most ranks are in step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet


class ReportCounts:
    """The numbers of reports of those ranks that somebody waits for. At first, these are all ranks, with no report."""

    def __init__(self, world_size: int) -> None:
        self._count = dict.fromkeys(range(world_size), 0)
        self._ranks_with = {0: set(self._count)} if world_size else {}
        """By number of reports: the ranks that have made as many. No set is empty."""

    def __contains__(self, rank: int) -> bool:
        """Return whether somebody waits for the rank."""
        return rank in self._count

    def set(self, rank: int, count: int) -> None:
        """Note that the rank has made ``count`` reports, and is waited for."""
        self.remove(rank)
        self._count[rank] = count
        self._ranks_with.setdefault(count, set()).add(rank)

    def remove(self, rank: int) -> None:
        """Note that nobody waits for the rank."""
        count = self._count.pop(rank, None)
        if count is None:
            return
        self._ranks_with[count].discard(rank)
        if not self._ranks_with[count]:
            del self._ranks_with[count]

    def ranks_with(self, count: int) -> AbstractSet[int]:
        """Return the ranks that have made ``count`` reports. They change with the next call."""
        return self._ranks_with.get(count, frozenset())

    @property
    def fewest(self) -> float:
        """The number of reports of the slowest rank; infinite if nobody waits for any rank."""
        return min(self._ranks_with, default=math.inf)

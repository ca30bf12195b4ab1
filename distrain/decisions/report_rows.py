"""Reports of all ranks, counted, and put together for callbacks: the n-th report of each makes row n.

Runs in: coordinator.

Pure: no I/O; ``now`` (time.monotonic seconds) is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.api.observer import ReportsJoined

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Set as AbstractSet

    from distrain.storage.checkpoint import Checkpoint

ROW_TIMEOUT_S = 10.0
"""Seconds that a row waits for ranks that have never reported."""


class ReportCounts:
    """The numbers of reports of those ranks that somebody waits for. At first, these are all ranks, with no report.

    Every method takes the same time for any number of ranks, as long as most ranks are in step.
    """

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
    def numbers(self) -> Collection[int]:
        """The numbers of reports that ranks have made. The next call may change them."""
        return self._ranks_with.keys()

    @property
    def fewest(self) -> float:
        """The number of reports of the slowest rank; infinite if nobody waits for any rank."""
        return min(self._ranks_with, default=math.inf)

    def fewest_above(self, least: int) -> float:
        """Return the number of reports of the slowest rank among those that have made more than ``least``."""
        return min((number for number in self._ranks_with if number > least), default=math.inf)


@dataclass(slots=True)
class _Row:
    since: float
    metrics: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    has_checkpoint: bool = False


class RowAssembly:
    """The rows of one attempt, completed in order and each once.

    A row is complete when every rank has made that report, or has finished, or has never reported although it had the
    time, and when its checkpoint is committed, if it has one. Later reports for it are ignored. A row without any
    report, because report() has failed everywhere, is left out.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rows: dict[int, _Row] = {}
        self._counts = ReportCounts(world_size)
        """Of the ranks that rows wait for: all but those that have finished, or have been silent for too long."""
        self._settled: dict[int, Checkpoint | None] = {}
        self._next = 1

    def reported(
        self, rank: int, index: int, metrics: dict[str, Any] | None, now: float, *, has_checkpoint: bool
    ) -> list[ReportsJoined]:
        """Add one report. ``metrics``: None if it has failed."""
        self._counts.set(rank, index)
        if index >= self._next:
            row = self._rows.setdefault(index, _Row(now))
            row.metrics[rank] = metrics
            row.has_checkpoint |= has_checkpoint
        return self._complete()

    def settled(self, ordinal: int, checkpoint: Checkpoint | None) -> list[ReportsJoined]:
        """Note that the checkpoint of the n-th reports is committed, or (None) never will be."""
        if ordinal >= self._next:
            self._settled[ordinal] = checkpoint
        return self._complete()

    def finished(self, rank: int) -> list[ReportsJoined]:
        """Note that the rank will not report again."""
        self._counts.remove(rank)
        return self._complete()

    def end(self) -> list[ReportsJoined]:
        """End the attempt: complete the remaining rows with the reports that there are."""
        for row in self._rows.values():
            row.has_checkpoint = False
        self._counts = ReportCounts(0)
        return self._complete()

    def deadline(self) -> float:
        """Return when :meth:`tick` may complete a row if nothing else happens."""
        row = self._rows.get(self._next)
        return row.since + ROW_TIMEOUT_S if row is not None and self._counts.ranks_with(0) else math.inf

    def tick(self, now: float) -> list[ReportsJoined]:
        """Stop waiting for ranks that have been silent for too long, until they report."""
        if now < self.deadline():
            return []
        for rank in list(self._counts.ranks_with(0)):
            self._counts.remove(rank)
        return self._complete()

    def _complete(self) -> list[ReportsJoined]:
        complete = []
        while (row := self._rows.get(self._next)) is not None and self._is_complete(row):
            del self._rows[self._next]
            metrics = [row.metrics.get(rank) for rank in range(self._world_size)]
            checkpoint = self._settled.pop(self._next, None)
            if any(found is not None for found in metrics):
                complete.append(ReportsJoined(metrics, checkpoint))
            self._next += 1
        return complete

    def _is_complete(self, row: _Row) -> bool:
        return self._counts.fewest >= self._next and (self._next in self._settled or not row.has_checkpoint)

"""The n-th reports of all ranks, put together for callbacks. Runs in: coordinator.

Pure: no I/O; ``now`` (time.monotonic seconds) is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distrain.checkpoint import Checkpoint

SILENCE_S = 10.0
"""How long a row waits for ranks that have never reported."""


@dataclass(slots=True)
class ReportRow:
    """The n-th report of every rank: its metrics, None for a rank without one; and the checkpoint that was committed
    with it.
    """

    since: float
    metrics: list[dict[str, Any] | None]
    checkpoint: Checkpoint | None = None
    ordinals: set[int] = field(default_factory=set)


class RowAssembly:
    """One attempt. RowAssembly come out in order, each once.

    A row is complete when every rank has made that report, or has finished, or has never reported although it had the
    time; and when its checkpoint is committed, if it has one. What comes later for it is passed over.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rows: dict[int, ReportRow] = {}
        self._reported: set[int] = set()
        self._gone: set[int] = set()
        self._settled: dict[int, Checkpoint | None] = {}
        self._next = 1

    def reported(
        self, rank: int, index: int, metrics: dict[str, Any], ordinal: int | None, now: float
    ) -> list[ReportRow]:
        """``ordinal`` counts the rank's checkpoints, if it has brought one."""
        self._reported.add(rank)
        self._gone.discard(rank)
        if index < self._next:
            return []
        row = self._rows.setdefault(index, ReportRow(now, [None] * self._world_size))
        row.metrics[rank] = metrics
        if ordinal is not None:
            row.ordinals.add(ordinal)
        return self._complete()

    def settled(self, ordinal: int, checkpoint: Checkpoint | None) -> list[ReportRow]:
        """A checkpoint is committed, or (None) will not be."""
        self._settled[ordinal] = checkpoint
        return self._complete()

    def finished(self, rank: int) -> list[ReportRow]:
        self._gone.add(rank)
        return self._complete()

    def end(self) -> list[ReportRow]:
        """The attempt is over: what there is of the remaining rows."""
        for row in self._rows.values():
            self._settled.update(dict.fromkeys(row.ordinals - self._settled.keys()))
        self._gone.update(range(self._world_size))
        return self._complete()

    def deadline(self) -> float | None:
        """When :meth:`tick` may complete a row if nothing else happens."""
        row = self._rows.get(self._next)
        silent = set(range(self._world_size)) - self._reported - self._gone
        return None if row is None or not silent else row.since + SILENCE_S

    def tick(self, now: float) -> list[ReportRow]:
        """Give up the ranks that have been silent for too long, until they report."""
        if (deadline := self.deadline()) is None or now < deadline:
            return []
        self._gone |= set(range(self._world_size)) - self._reported
        return self._complete()

    def _complete(self) -> list[ReportRow]:
        complete = []
        while (row := self._rows.get(self._next)) is not None and self._is_complete(row):
            del self._rows[self._next]
            settled = [self._settled[ordinal] for ordinal in sorted(row.ordinals)]
            row.checkpoint = next((checkpoint for checkpoint in settled if checkpoint is not None), None)
            complete.append(row)
            self._next += 1
        return complete

    def _is_complete(self, row: ReportRow) -> bool:
        missing = {rank for rank, metrics in enumerate(row.metrics) if metrics is None}
        return missing <= self._gone and row.ordinals <= self._settled.keys()

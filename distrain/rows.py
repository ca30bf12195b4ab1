"""The n-th reports of all ranks, put together for callbacks. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Row", "Rows"]


@dataclass(slots=True)
class Row:
    """The n-th report of every rank: its metrics, None for a rank without one; and the path of the checkpoint that was
    committed with it."""

    metrics: list[dict[str, Any] | None]
    checkpoint: str | None = None
    ordinals: set[int] = field(default_factory=set)


class Rows:
    """One attempt. Rows come out in order, each once.

    A row is complete when every rank has made that report, has finished, or has never reported while one of the others
    has gone on to its next; and when its checkpoint is committed, if it has one.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rows: dict[int, Row] = {}
        self._reports: dict[int, int] = {}
        self._finished: set[int] = set()
        self._settled: dict[int, str | None] = {}
        self._next = 1

    def reported(self, rank: int, index: int, metrics: dict[str, Any], ordinal: int | None) -> list[Row]:
        """``ordinal`` counts the rank's checkpoints, if it has brought one."""
        row = self._rows.setdefault(index, Row([None] * self._world_size))
        row.metrics[rank] = metrics
        if ordinal is not None:
            row.ordinals.add(ordinal)
        self._reports[rank] = index
        return self._complete()

    def settled(self, ordinal: int, path: str | None) -> list[Row]:
        """A checkpoint is committed, or (None) will not be."""
        self._settled[ordinal] = path
        return self._complete()

    def finished(self, rank: int) -> list[Row]:
        self._finished.add(rank)
        return self._complete()

    def end(self) -> list[Row]:
        """The attempt is over: what there is of the remaining rows."""
        for row in self._rows.values():
            self._settled.update(dict.fromkeys(row.ordinals - self._settled.keys()))
        self._finished.update(range(self._world_size))
        return self._complete()

    def _complete(self) -> list[Row]:
        complete = []
        while (row := self._rows.get(self._next)) is not None and self._is_complete(self._next, row):
            del self._rows[self._next]
            paths = [self._settled[ordinal] for ordinal in sorted(row.ordinals)]
            row.checkpoint = next((path for path in paths if path is not None), None)
            complete.append(row)
            self._next += 1
        return complete

    def _is_complete(self, index: int, row: Row) -> bool:
        gone_on = any(reports > index for reports in self._reports.values())
        missing = [rank for rank, metrics in enumerate(row.metrics) if metrics is None and rank not in self._finished]
        if any(rank in self._reports or not gone_on for rank in missing):
            return False
        return row.ordinals <= self._settled.keys()

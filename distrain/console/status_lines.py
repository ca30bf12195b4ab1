"""Lines about the progress of a run, for consoles that are no terminals. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.storage.retention import flatten
from distrain.system.log import say

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

REPORT_INTERVAL_S = 0.5
"""Seconds between two report lines on the console; metrics.jsonl has all reports."""


class ReportLines:
    """Console lines for rank 0's reports, at most one per :data:`REPORT_INTERVAL_S`, and always the last report."""

    def __init__(self) -> None:
        self._shown_at = -REPORT_INTERVAL_S
        self._pending: str | None = None

    def report(self, index: int, metrics: Mapping[str, Any], now: float) -> None:
        self._pending = f"report {index}: " + (", ".join(_shown(metrics)) or "no metrics")
        if now >= self._shown_at + REPORT_INTERVAL_S:
            self.flush(now)

    def deadline(self) -> float | None:
        """Return the time for the next :meth:`flush` if no report comes before, or None."""
        return None if self._pending is None else self._shown_at + REPORT_INTERVAL_S

    def flush(self, now: float) -> None:
        if self._pending is not None:
            say(self._pending)
            self._pending, self._shown_at = None, now


def _shown(metrics: Mapping[str, Any]) -> Iterator[str]:
    for name, value in flatten(metrics).items():
        yield f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={_one_line(value):.60}"


def _one_line(value: object) -> str:
    return "".join(c if c.isprintable() else " " for c in str(value))

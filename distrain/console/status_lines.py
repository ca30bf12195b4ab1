"""Lines about how far a run is, for consoles that are no terminals. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.system.log import say
from distrain.system.text import duration, number, printable, rate

if TYPE_CHECKING:
    from distrain.decisions.run_status import RunStatus

INTERVAL_S = 30.0
"""Seconds between two lines. metrics.jsonl has all reports."""
_LONGEST_VALUE = 60


class StatusLines:
    """A line for the first report of rank 0, then at most one per :data:`INTERVAL_S`, and always one for the last."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        self._shown_at = -INTERVAL_S
        self._is_pending = False

    def reported(self, now: float) -> None:
        """Note that rank 0 has made a report, which the status has."""
        self._is_pending = True
        if now >= self._shown_at + INTERVAL_S:
            self.flush(now)

    def deadline(self) -> float | None:
        """Return the time for the next :meth:`flush` if no report comes before, or None."""
        return self._shown_at + INTERVAL_S if self._is_pending else None

    def flush(self, now: float) -> None:
        """Show the newest report, unless it was shown."""
        if self._is_pending:
            say(status_line(self._status))
            self._is_pending, self._shown_at = False, now


def status_line(status: RunStatus) -> str:
    """Return the progress and the metrics of rank 0 in one line."""
    speed, left = status.rate(), status.left_s()
    if status.progress is None:
        parts = [f"report {status.ranks[0].reports}"]
    else:
        done, total = status.progress
        parts = [f"{number(done)}/{number(total)} ({done / total if total else 1:.0%})"]
    parts += [rate(speed)] if speed else []
    parts += [f"{duration(left)} left"] if left else []
    metrics = (f"{printable(name)}={_shown(value)}" for name, value in status.metrics.items())
    return f"{', '.join(parts)}: {', '.join(metrics) or 'no metrics'}"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return number(value)
    return printable(str(value))[:_LONGEST_VALUE]

"""The last lines of a run: how it ended, how long it took, its metrics and checkpoints. Runs in: coordinator."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from distrain.system.text import broken, duration, number, printable, rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrain.api.observer import Ended
    from distrain.decisions.run_status import RunStatus

_MOST_METRICS = 12


def summary(ended: Ended, status: RunStatus) -> str:
    """Return the last lines of a run."""
    lines = [f"{ended.how} after {duration(ended.seconds)}{broken(status.metrics)}; results in {status.location}"]
    return "\n    ".join([*lines, *_details(ended, status)])


def _details(ended: Ended, status: RunStatus) -> Iterator[str]:
    yield f"started:     {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(time.time() - ended.seconds))}"
    if status.restarts:
        yield f"restarts:    {status.restarts}" + (f", which cost {duration(status.lost_s)}" if status.lost_s else "")
    if reports := status.reports:
        speed = status.rate()
        yield f"reports:     {reports:,} of rank 0" + (f", {rate(speed)} at the end" if speed else "")
    elif any(rank.reports for rank in status.ranks):
        yield "reports:     none of rank 0, so Result.metrics is None; metrics.jsonl has those of the other ranks"
    if status.metrics:
        shown = [f"{printable(name)}={number(value)}" for name, value in status.metrics.items()][:_MOST_METRICS]
        others = len(status.metrics) - len(shown)
        yield f"metrics:     {', '.join(shown)}" + (f", and {others} others" if others else "")
    if ended.checkpoints:
        kept = f", {len(ended.checkpoints)} kept" if len(ended.checkpoints) > 1 else ""
        yield f"checkpoints: {ended.checkpoints[-1].path.name}{kept}"
    if ended.advice:
        yield f"continue:    {ended.advice}"

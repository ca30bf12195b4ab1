"""The last lines of a run: how it ended, how long it took, its metrics and checkpoints. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distrain.storage.retention import best_first, has_metric
from distrain.system.text import duration, number, rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrain.decisions.run_status import RunStatus
    from distrain.storage.records import CommittedCheckpoint
    from distrain.storage.retention import Retention

_LOWEST_IS_BEST = {"loss", "losses", "error", "err", "perplexity", "ppl", "mse", "mae", "rmse", "wer", "cer"}
_HIGHEST_IS_BEST = {"acc", "accuracy", "f1", "auc", "precision", "recall", "bleu", "reward", "iou"}
_MOST_METRICS = 12


def summary(
    verdict: str,
    status: RunStatus,
    *,
    started_at: str,
    retention: Retention,
    checkpoints: list[CommittedCheckpoint],
    advice: str | None = None,
) -> str:
    """Return the last lines of a run.

    verdict: how it ended.
    started_at: when it began, as people read it.
    retention: says which metric of a checkpoint is its score.
    checkpoints: those that are kept, the oldest first.
    advice: how to continue the run, if no error says it.
    """
    lines = [verdict, *_details(status, started_at, retention, checkpoints)]
    return "\n    ".join([*lines, f"continue:    {advice}"] if advice else lines)


def _details(
    status: RunStatus, started_at: str, retention: Retention, checkpoints: list[CommittedCheckpoint]
) -> Iterator[str]:
    yield f"started:     {started_at}"
    if status.restarts:
        yield f"restarts:    {status.restarts}, which cost {duration(status.lost_s)}"
    if status.ranks and (reports := status.ranks[0].reports):
        speed = status.rate()
        where = " in the last attempt" if status.restarts else ""
        yield f"reports:     {reports:,} of rank 0{where}" + (f", {rate(speed)} at the end" if speed else "")
    if status.metrics:
        shown = [_metric(name, status, retention) for name in status.metrics][:_MOST_METRICS]
        others = len(status.metrics) - len(shown)
        yield f"metrics:     {', '.join(shown)}" + (f", and {others} others" if others else "")
    if checkpoints:
        yield f"checkpoints: {', '.join(_checkpoints(checkpoints, retention))}"


def _metric(name: str, status: RunStatus, retention: Retention) -> str:
    value = status.metrics[name]
    best = status.extremes.get(name)
    text = f"{name}={number(value) if isinstance(value, float) else value}"[:80]
    if best is None or (order := _order(name, retention)) is None:
        return text
    extreme, word = (best[0], "lowest") if order == "min" else (best[1], "highest")
    return text if extreme == value else f"{text} ({word}: {number(extreme)})"


def _order(name: str, retention: Retention) -> str | None:
    """Return ``min`` if the lowest value of a metric is the best, ``max`` if the highest is, None if nobody knows."""
    if name == retention.checkpoint_score_attribute:
        return retention.checkpoint_score_order
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return "min" if words & _LOWEST_IS_BEST else "max" if words & _HIGHEST_IS_BEST else None


def _checkpoints(checkpoints: list[CommittedCheckpoint], retention: Retention) -> Iterator[str]:
    yield checkpoints[-1].path.name
    name = retention.checkpoint_score_attribute
    best = checkpoints[best_first([saved.metrics for saved in checkpoints], retention)[0]]
    if name is not None and has_metric(best.metrics, name):
        yield f"the best by {name} is {best.path.name}"
    if len(checkpoints) > 1:
        yield f"{len(checkpoints)} kept"

"""The choice of the best checkpoints, and of those to delete. Pure: no I/O, no clock. Runs in: anywhere."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain.system.text import flatten as flatten

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

LOWEST_IS_BEST = re.compile(
    "loss|error|perplexity|cross_?entropy|seconds|latency"
    "|(?<![a-z])(err|ppl|nll|bp[bc]|r?msl?e|mae|s?mape|wer|cer|fid|time)(?![a-z])"
)
"""Names, in lower case, of metrics of which the lowest value usually is the best. JavaScript reads the pattern, too."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The number of checkpoints to keep, and the metric that compares them: a part of CheckpointConfig.

    Raises TypeError or ValueError for invalid fields, as a damaged ``run.json`` may have.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"

    def __post_init__(self) -> None:
        for name, kind in (("num_to_keep", int), ("checkpoint_score_attribute", str)):
            if not isinstance(getattr(self, name), kind | None):
                raise TypeError(f"{name} is {getattr(self, name)!r}")
        if self.checkpoint_score_order not in ("max", "min"):
            raise ValueError(f"checkpoint_score_order is {self.checkpoint_score_order!r}")


def score(metrics: Mapping[str, Any], attribute: str, order: str) -> float:
    """Return the score by a metric: larger is better. Missing, non-numeric and NaN metrics score -inf."""
    value = look_up(metrics, attribute)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return -math.inf
    try:
        number = float(value)
    except OverflowError:  # an int beyond the floats
        number = math.inf if value > 0 else -math.inf
    if math.isnan(number):
        return -math.inf
    return number if order == "max" else -number


def look_up(metrics: Mapping[str, Any], attribute: str) -> Any:
    """Return ``metrics["a/b"]`` or ``metrics["a"]["b"]``, or None, for the attribute ``"a/b"``."""
    return flatten(metrics).get(attribute)


def best_first(metrics: Sequence[Mapping[str, Any]], rule: Retention) -> list[int]:
    """Return the indices of checkpoints, the best first, given their metrics in order of commit.

    Of equal ones, the newer is first.
    """
    attribute = rule.checkpoint_score_attribute
    newest_first = range(len(metrics) - 1, -1, -1)
    if attribute is None:
        return list(newest_first)
    return sorted(newest_first, key=lambda i: score(metrics[i], attribute, rule.checkpoint_score_order), reverse=True)


def surplus(metrics: Sequence[Mapping[str, Any]], rule: Retention, doubtful: Collection[int] = ()) -> list[int]:
    """Return the indices of the checkpoints to delete: all but the best ``num_to_keep`` and the latest.

    doubtful: the indices of those that may lack files of some ranks. They are worse than any other one.
    """
    if rule.num_to_keep is None:
        return []
    latest = len(metrics) - 1
    order = sorted(best_first(metrics, rule), key=lambda i: i in doubtful)
    return sorted(i for i in order[rule.num_to_keep :] if i != latest)

"""The use of a run's time, in parts that add up to its wall time. Pure: no I/O, no clock. Runs in: anywhere."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """The times of one attempt, in seconds since 1970.

    training: when every rank had begun train_func, None if that did not happen or is not known. kept_until: the end of
    the work that no later attempt repeated; None if none was repeated. data, checkpoint: seconds within that work for
    which the rank that waited most has waited.
    """

    started: float
    training: float | None
    ended: float
    kept_until: float | None = None
    data: float = 0.0
    checkpoint: float = 0.0


PARTS = {
    "training": ("training", "All ranks were in train_func, and none of the other reasons applies."),
    "data": (
        "waiting for data",
        "Waiting for the next batch from a loader that distrain has prepared, by the rank that waited most.",
    ),
    "checkpoint": (
        "blocked by checkpoints",
        "report() could not return because a checkpoint was being written, on the rank that waited most.",
    ),
    "hung": ("hung", "No rank made progress, until a hang was noticed or progress went on."),
    "repeated": ("repeated after failures", "Work after the checkpoint from which a later attempt began again."),
    "starting": (
        "starting and ending",
        "From the beginning of fit() or of an attempt until every rank had entered train_func; and closing the run.",
    ),
    "between": ("between attempts", "From the end of an attempt to the beginning of the next: nothing ran."),
}
"""By a word for style sheets, what the part is called, and how it was measured."""


def where_time_went(
    attempts: Sequence[AttemptTimes], *, started: float, ended: float, hangs: Sequence[tuple[float, float]] = ()
) -> dict[str, float]:
    """Return the seconds of all :data:`PARTS` of the time from ``started`` to ``ended``. They add up to it.

    hangs: times in which no rank made progress, ``(from, until)``. A hang counts as such even if its work was repeated.
    """
    seconds, hung_before = dict.fromkeys(PARTS, 0.0), _covered_before(hangs)
    now = started
    for number, attempt in enumerate(attempts):
        begin = min(max(now, attempt.started), ended)
        end = min(max(begin, attempt.ended), ended)
        seconds["between" if number else "starting"] += begin - now
        _add_attempt(seconds, attempt, begin, end, hung_before)
        now = end
    seconds["starting"] += max(0.0, ended - now)
    return seconds


def _add_attempt(
    seconds: dict[str, float], attempt: AttemptTimes, begin: float, end: float, hung_before: Callable[[float], float]
) -> None:
    training = end if attempt.training is None else min(max(begin, attempt.training), end)
    kept_until = end if attempt.kept_until is None else min(max(training, attempt.kept_until), end)
    hung_kept = hung_before(kept_until) - hung_before(training)
    hung_lost = hung_before(end) - hung_before(kept_until)
    kept = max(0.0, kept_until - training - hung_kept)
    waits = attempt.data + attempt.checkpoint
    share = min(1.0, kept / waits) if waits > 0 else 0.0
    seconds["starting"] += training - begin
    seconds["hung"] += hung_kept + hung_lost
    seconds["repeated"] += end - kept_until - hung_lost
    seconds["data"] += attempt.data * share
    seconds["checkpoint"] += attempt.checkpoint * share
    seconds["training"] += max(0.0, kept - waits * share)


def _covered_before(spans: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Return a function that says how much of the time before a moment some of the spans cover. Spans may overlap."""
    ordered = sorted(spans)
    ends = list(accumulate((end for _, end in ordered), max, initial=-math.inf))  # of all spans before
    new = [(max(begin, before), end) for (begin, end), before in zip(ordered, ends, strict=False)]
    new = [span for span in new if span[0] < span[1]]
    totals: list[float] = list(accumulate((end - begin for begin, end in new), initial=0.0))

    def covered_before(moment: float) -> float:
        number = bisect_right(new, (moment, math.inf))
        return totals[number] - (max(0.0, new[number - 1][1] - moment) if number else 0.0)

    return covered_before

"""The use of a run's time, in parts that add up to its wall time. Pure: no I/O, no clock. Runs in: anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """The times of one attempt, in seconds since 1970.

    training: when every rank had begun train_func, None if that did not happen or is not known. kept_until: the end of
    the work that no later attempt repeated; None if none was repeated. waits: seconds within that work for which the
    rank that waited most has waited, for data and for checkpoints.
    """

    started: float
    training: float | None
    ended: float
    kept_until: float | None = None
    waits: tuple[float, float] = (0.0, 0.0)


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
    attempts: Sequence[AttemptTimes], hangs: Sequence[tuple[float, float]], *, started: float, ended: float
) -> dict[str, float]:
    """Return the seconds of all :data:`PARTS` of the time from ``started`` to ``ended``. They add up to it.

    hangs: times in which no rank made progress, ``(from, until)``. They count as such even if the work was repeated.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    now = started
    for number, attempt in enumerate(attempts):
        begin = min(max(now, attempt.started), ended)
        end = min(max(begin, attempt.ended), ended)
        seconds["between" if number else "starting"] += begin - now
        _add_attempt(seconds, attempt, hangs, begin, end)
        now = end
    seconds["starting"] += max(0.0, ended - now)
    return seconds


def _add_attempt(
    seconds: dict[str, float], attempt: AttemptTimes, hangs: Sequence[tuple[float, float]], begin: float, end: float
) -> None:
    training = end if attempt.training is None else min(max(begin, attempt.training), end)
    kept_until = end if attempt.kept_until is None else min(max(training, attempt.kept_until), end)
    hung_kept, hung_lost = _hung(hangs, training, kept_until), _hung(hangs, kept_until, end)
    kept = max(0.0, kept_until - training - hung_kept)
    waited = sum(attempt.waits)
    share = min(1.0, kept / waited) if waited > 0 else 0.0
    seconds["starting"] += training - begin
    seconds["hung"] += hung_kept + hung_lost
    seconds["repeated"] += end - kept_until - hung_lost
    seconds["data"] += attempt.waits[0] * share
    seconds["checkpoint"] += attempt.waits[1] * share
    seconds["training"] += max(0.0, kept - waited * share)


def _hung(hangs: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    parts = (min(end, until) - max(begin, since) for since, until in hangs)
    return min(end - begin, sum(part for part in parts if part > 0))

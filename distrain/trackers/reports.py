"""The choice of the reports that are new to a tracker, and their steps. Pure: no I/O, no clock. Runs in: coordinator.

A restart repeats reports. The *number* of a report, ``first_step`` of its attempt + ``index``, is the same each time. A
tracker gets only reports whose number is above the highest number that it has had of that rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distrain.api.tracker import Report
from distrain.storage.retention import flatten


@dataclass(slots=True)
class Progress:
    """How far a tracker has got; saved in the run directory.

    metrics, events: bytes of metrics.jsonl and events.jsonl that it has had.
    marks: by rank, the highest number of a report, and its step.
    """

    metrics: int = 0
    events: int = 0
    marks: dict[int, tuple[int, int]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        marks = {str(rank): list(mark) for rank, mark in self.marks.items()}
        return {"metrics": self.metrics, "events": self.events, "marks": marks}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Progress:
        """Return the stored progress. Raise ValueError, KeyError, TypeError or AttributeError if it is damaged."""
        marks = {int(rank): (int(number), int(step)) for rank, (number, step) in stored["marks"].items()}
        return cls(int(stored["metrics"]), int(stored["events"]), marks)


def first_steps(attempts: Sequence[Mapping[str, Any]], *, is_over: bool) -> dict[int, int | None]:
    """Return the first step of each attempt, by its number.

    attempts: those of run.json. is_over: the run has ended.
    An attempt that is missing here has no first step yet: its ranks are still starting. None: it is unknown, as fit()
    was killed before it could write it. The next attempt repeats these reports.
    """
    found: dict[int, int | None] = {}
    for place, attempt in enumerate(attempts):
        number = int(attempt["attempt"])
        if attempt.get("training") is not None or attempt.get("ended") is not None:
            found[number] = int(attempt["first_step"])
        elif is_over or place + 1 < len(attempts):
            found[number] = None if place else 0
    return found


def new_report(record: Mapping[str, Any], first_step: int | None, marks: dict[int, tuple[int, int]]) -> Report | None:
    """Return the report in a record of metrics.jsonl, and note its number, or None if the tracker has had it."""
    rank = record["rank"]
    highest, last_step = marks.get(rank, (0, 0))
    if first_step is None or (number := first_step + record["index"]) <= highest:
        return None
    step = _step(record.get("progress"), number, last_step)
    marks[rank] = number, step
    metrics = numbers_in(record["metrics"])
    return Report(rank=rank, step=step, time=record["time"], attempt=record["attempt"], metrics=metrics)


def _step(progress: Sequence[float] | None, number: int, last_step: int) -> int:
    """Return the step of a report, which is never below the last one: some trackers would drop it."""
    if progress and last_step <= progress[0] == int(progress[0]):
        return int(progress[0])
    return max(number, last_step + 1)


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers and booleans among the metrics, nested ones flattened, without ints beyond the floats.

    >>> numbers_in({"loss": 1, "eval": {"ok": True}, "note": "text"})
    {'loss': 1.0, 'eval/ok': 1.0}
    """
    found: dict[str, float] = {}
    for name, value in flatten(metrics).items():
        if isinstance(value, (int, float)):
            try:
                found[str(name)] = float(value)
            except OverflowError:
                continue
    return found


def tracked_config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a run for trackers, by its run.json."""
    own = manifest.get("train_loop_config")
    scaling = {key: value for key, value in (manifest.get("scaling_config") or {}).items() if value not in (None, [])}
    return {**(own if isinstance(own, Mapping) else {}), "scaling": scaling}


def tracked_tags(manifest: Mapping[str, Any], location: str) -> dict[str, str]:
    """Return facts about a run for trackers, by its run.json."""
    facts = {"distrain": manifest.get("distrain"), "python": manifest.get("python"), "run_directory": location}
    return {name: str(value) for name, value in facts.items() if value}

"""The choice of the reports that are new to a tracker, and their steps. Pure: no I/O, no clock. Runs in: tracker.

A restart repeats reports. The *number* of a report, ``first_step`` of its attempt + ``index``, is the same each time. A
tracker gets only reports whose number is above the highest number that it has had of that rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distrain.api.tracker import Report
from distrain.storage.lines import with_nonfinite
from distrain.storage.retention import flatten

_NOT_RECORDED = -1
"""First step of an attempt of an early version, which recorded none: each of its reports counts as a new one."""


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
        if "first_step" not in attempt:
            found[number] = _NOT_RECORDED
        elif attempt.get("training") is not None or attempt.get("ended") is not None:
            found[number] = int(attempt["first_step"])
        elif is_over or place + 1 < len(attempts):
            found[number] = None if place else 0
    return found


def is_of_rank_0(line: bytes) -> bool:
    """Tell if a line may be a report of rank 0, without parsing it."""
    return b'"rank":0,' in line


def attempt_of(record: Mapping[str, Any]) -> int:
    """Return the attempt of a record. Raise KeyError, TypeError or ValueError if it is damaged."""
    return int(record["attempt"])


def new_report(record: Mapping[str, Any], first_step: int | None, marks: dict[int, tuple[int, int]]) -> Report | None:
    """Return the report in a record of metrics.jsonl, and note its number, or None if the tracker has had it.

    Raise ValueError, KeyError, TypeError or AttributeError if the record is damaged.
    """
    rank, index = int(record["rank"]), int(record["index"])
    highest, last_step = marks.get(rank, (0, 0))
    if first_step is None:
        return None
    number = highest + 1 if first_step == _NOT_RECORDED else first_step + index
    if number <= highest:
        return None
    metrics = numbers_in(with_nonfinite(record["metrics"], record.get("nonfinite", {})))
    step = _step(record.get("progress"), number, last_step)
    report = Report(rank=rank, step=step, time=record["time"], attempt=attempt_of(record), metrics=metrics)
    marks[rank] = number, step
    return report


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


def record_in(line: bytes) -> dict[str, Any]:
    """Return the record in a line. Raise ValueError or TypeError if the line is damaged."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise TypeError("not an object")
    return record


def checkpoint_in(line: bytes) -> tuple[str, int] | None:
    """Return name and step of the checkpoint in a line of events.jsonl, or None for another event.

    Raise ValueError, TypeError or KeyError if the line is damaged.
    """
    event = record_in(line)
    return (str(event["name"]), int(event["step"])) if event["event"] == "checkpoint" else None


def tracked_config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a run for trackers, by its run.json."""
    own = manifest.get("train_loop_config")
    scaling = {key: value for key, value in (manifest.get("scaling_config") or {}).items() if value not in (None, [])}
    return {**(own if isinstance(own, Mapping) else {}), "scaling": scaling}


def tracked_tags(manifest: Mapping[str, Any], location: str) -> dict[str, str]:
    """Return facts about a run for trackers, by its run.json."""
    facts = {"distrain": manifest.get("distrain"), "python": manifest.get("python"), "run_directory": location}
    return {name: str(value) for name, value in facts.items() if value}

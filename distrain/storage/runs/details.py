"""The contents of the files of one run: its checkpoints, best metrics and error. Runs in: anywhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distrain.storage import names
from distrain.storage.checkpoint import MANIFEST_FILE
from distrain.storage.lines import read_events, read_metrics
from distrain.storage.paths import RunPaths, is_copy
from distrain.storage.retention import flatten
from distrain.storage.runs.listing import FAILED, Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class SavedCheckpoint(NamedTuple):
    """A committed checkpoint. ``step`` and ``bytes`` are those in its manifest."""

    name: str
    step: int
    bytes: int
    metrics: dict[str, Any]
    time: float


class Extreme(NamedTuple):
    """The least and the largest value of a metric, with their steps."""

    least: float
    least_step: int
    largest: float
    largest_step: int


def checkpoints_of(run: Run) -> list[SavedCheckpoint]:
    """Return the checkpoints of a run, the oldest first, without copies and damaged ones. Raise OSError."""
    folder = run.location
    if isinstance(folder, Path):
        paths: Iterable[Any] = RunPaths(folder).checkpoints()
    else:
        paths = [folder / name for name in folder.names() if not name.startswith(".")]
    found = []
    for path in paths:
        try:
            manifest = json.loads((path / MANIFEST_FILE).read_bytes())
            if not is_copy(path.name, manifest):
                found.append((int(manifest["index"]), _saved(path.name, manifest)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # it is none, or is being deleted
            continue
    return [saved for _, saved in sorted(found, key=lambda pair: pair[0])]


def _saved(name: str, manifest: dict[str, Any]) -> SavedCheckpoint:
    size = sum(int(fact["size"]) for fact in manifest["files"].values())
    return SavedCheckpoint(
        name, int(manifest.get("step", 0)), size, manifest["metrics"], float(manifest.get("time", 0))
    )


def reports_of(run: Run, rank: int | None = 0) -> Iterator[dict[str, Any]]:
    """Yield the reports of one rank or (None) of all, each with its ``step`` over the whole run. Raise OSError."""
    for record in read_metrics(run.location / names.METRICS, rank=rank):
        yield {**record, "step": run.step_of(record)}


def extremes_of(reports: Iterable[dict[str, Any]]) -> dict[str, Extreme]:
    """Return the least and the largest finite value of each numeric metric."""
    found: dict[str, Extreme] = {}
    for report in reports:
        for name, item in flatten(report["metrics"]).items():
            if isinstance(item, bool) or not isinstance(item, (int, float)) or not math.isfinite(item):
                continue
            before = found.get(name) or Extreme(item, report["step"], item, report["step"])
            if item < before.least:
                before = before._replace(least=item, least_step=report["step"])
            if item > before.largest:
                before = before._replace(largest=item, largest_step=report["step"])
            found[name] = before
    return found


def hangs_of(run: Run) -> int:
    """Return how often all ranks have hung. Raise OSError."""
    return sum(event["event"] == "hang" for event in read_events(run.location / names.EVENTS))


def error_of(run: Run) -> str:
    """Return the text of the error of a failed run, "" if there is none."""
    return error_with_type(run)[1] if run.state == FAILED else ""


def error_with_type(run: Run) -> tuple[str, str]:
    """Return the name of the type and the text of the error that fit() has raised, "" if there is none."""
    try:
        error = json.loads((run.location / names.ERROR_TEXT).read_bytes())
        return str(error["type"]), str(error["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""

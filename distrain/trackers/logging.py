"""A tracker at work on one run: it gets each report once, whatever a restart repeats. Runs in: coordinator.

A restart repeats reports. The *number* of a report counts the reports of rank 0 over the whole run; it is the same each
time. A tracker gets only reports whose number is above the highest one that it has had.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distrain.api.tracker import Report, TrackedRun, Tracker, name_of
from distrain.storage import names
from distrain.storage.files import write_atomically
from distrain.storage.lines import parse_json, read_file
from distrain.storage.ownership import check_owners
from distrain.storage.retention import flatten
from distrain.storage.runs.details import reports_of
from distrain.storage.runs.listing import run_at

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.storage.checkpoint import Checkpoint

_FLUSH_S = 1.0


class TrackerLog:
    """The reports of one run, logged to a copy of a tracker.

    files: the directory with the records of the run. location: the run directory as users know it.
    """

    def __init__(self, tracker: Tracker, files: Path, location: str) -> None:
        self._tracker = copy.copy(tracker)
        self._files = files
        self._location = location
        self._state_file = files / names.TRACKERS / f"{name_of(tracker)}.json"
        self.highest = self._last_step = 0
        """The highest number of a report that the tracker has had, and its step."""
        self._is_new = True
        self._flushed_at = 0.0
        self._run: TrackedRun

    def start(self) -> str | None:
        """Begin, or continue where the tracker was, and log what it has missed. Raise what the tracker raises.

        Return the address at which people see the tracked run, if the tracker knows it.
        """
        check_owners(self._files)
        run, state = run_at(self._files), {}
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            stored = parse_json(read_file(self._state_file, self._files))
            state, self.highest, self._last_step = dict(stored["state"]), stored["highest"], stored["last_step"]
        if "id" not in state:  # the same even if this process dies before it has saved it
            text = f"{self._location} {run.manifest.get('started')}"
            state["id"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._run = TrackedRun(
            id=state["id"],
            name=run.manifest.get("name", self._files.name),
            directory=self._files,
            location=self._location,
            config=_config(run.manifest),
            tags=_tags(run.manifest, self._location),
            state=state,
        )
        self._tracker.start(self._run)
        self.flush()
        self.catch_up()
        self.flush()
        return state.get("url")

    def catch_up(self) -> None:
        """Log the reports in the files of the run that the tracker has missed."""
        for record in reports_of(run_at(self._files)):
            self._add(record)

    def report(self, record: Mapping[str, Any]) -> None:
        """Log a report of rank 0, unless the tracker has had it, after those that were left out before it.

        record: as in metrics.jsonl. Its ``step`` is the number of the report.
        """
        if record["step"] > self.highest + 1:
            self.catch_up()
        self._add(record)

    def _add(self, record: Mapping[str, Any]) -> None:
        number, progress = record["step"], record.get("progress")
        if number <= self.highest:
            return
        step = max(number, self._last_step + 1)
        if progress and self._last_step <= progress[0] == int(progress[0]):
            step = int(progress[0])  # never below the last step: some trackers would drop it
        self.highest, self._last_step, self._is_new = number, step, True
        metrics = numbers_in(record["metrics"])
        self._tracker.log(Report(step=step, time=record["time"], attempt=record["attempt"], metrics=metrics))
        if time.monotonic() > self._flushed_at + _FLUSH_S:
            self.flush()

    def checkpoint(self, checkpoint: Checkpoint, step: int) -> None:
        """Log a checkpoint, if the tracker wants that, and ``num_to_keep`` has not allowed its deletion meanwhile."""
        try:
            if self._tracker.checkpoints and checkpoint.exists():
                self._tracker.checkpoint(checkpoint, step)
        except OSError:
            if checkpoint.exists():
                raise

    def flush(self) -> None:
        """Have the tracker keep what is new, and note that."""
        self._flushed_at = time.monotonic()
        if self._is_new:
            self._tracker.flush()
            self._is_new = False
            self._save()

    def finish(self, status: str) -> None:
        """End the tracked run. Raise what the tracker raises."""
        self.flush()
        self._tracker.finish(status)
        self._save()

    def _save(self) -> None:
        state = {"highest": self.highest, "last_step": self._last_step, "state": self._run.state}
        data = json.dumps(state, indent=1).encode()
        self._state_file.parent.mkdir(exist_ok=True)
        write_atomically(self._state_file, data)


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers and booleans among the metrics, nested ones flattened, without ints beyond the floats."""
    found: dict[str, float] = {}
    for name, value in flatten(metrics).items():
        with contextlib.suppress(OverflowError):
            if isinstance(value, (int, float)):
                found[name] = float(value)
    return found


def _config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a run for trackers, by its run.json."""
    own = manifest.get("train_loop_config")
    scaling = {key: value for key, value in (manifest.get("scaling_config") or {}).items() if value not in (None, [])}
    return {**(own if isinstance(own, Mapping) else {}), "scaling": scaling}


def _tags(manifest: Mapping[str, Any], location: str) -> dict[str, str]:
    """Return facts about a run for trackers, by its run.json."""
    facts = {"distrain": manifest.get("distrain"), "python": manifest.get("python"), "run_directory": location}
    return {name: str(value) for name, value in facts.items() if value}

"""One tracker of one run: it reads what is new in the run directory, and logs it. Runs in: coordinator, anywhere."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from distrain.api.tracker import TrackedRun, Tracker, name_of
from distrain.errors import StorageError
from distrain.storage.checkpoint import Checkpoint
from distrain.storage.files import write_atomically
from distrain.storage.lines import event_in, record_in
from distrain.storage.ownership import check_owners
from distrain.storage.paths import RunPaths, read_manifest
from distrain.trackers.reports import Progress, first_steps, new_report, tracked_config, tracked_tags

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distrain.api.tracker import Report

_CHUNK_BYTES = 1 << 20
"""Bytes of a file that are read at once."""


class Follower:
    """A tracker that follows a run directory. It works with a copy of ``tracker``.

    location: the run directory as users know it. filesystem: its filesystem, if users have given one.
    """

    def __init__(self, tracker: Tracker, paths: RunPaths, location: str, filesystem: Any = None) -> None:
        self._tracker = copy.copy(tracker)
        self._paths = paths
        self._location = location
        self._filesystem = filesystem
        self._state_file = paths.tracker_state(name_of(tracker))
        self._first_steps: dict[int, int | None] = {}
        self._progress = Progress()
        self._run: TrackedRun

    def start(self) -> None:
        """Begin, or go on where the tracker was in an earlier ``fit()``. Raise what the tracker raises."""
        check_owners(self._paths.root)
        manifest, state = read_manifest(self._paths.root), {}
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            stored = json.loads(self._state_file.read_bytes())
            state, self._progress = dict(stored["state"]), Progress.from_json(stored)
        if "id" not in state:  # the same even if this process dies before it has saved it
            state["id"] = hashlib.sha256(f"{self._location} {manifest.get('started')}".encode()).hexdigest()[:16]
        self._run = TrackedRun(
            id=state["id"],
            name=manifest.get("name", self._paths.root.name),
            directory=self._paths.root,
            location=self._location,
            config=tracked_config(manifest),
            tags=tracked_tags(manifest, self._location),
            state=state,
        )
        self._tracker.start(self._run)
        self._flush()

    @property
    def url(self) -> str | None:
        """The address at which people see the tracked run, if the tracker knows it."""
        url = self._run.state.get("url")
        return None if url is None else str(url)

    def advance(self, *, is_over: bool) -> bool:
        """Log a part of what is new, and return True, or False if there is nothing new.

        is_over: nothing will be written any more.
        Raise what the tracker raises.
        """
        before = self._progress.metrics, self._progress.events
        for report in self._new_reports(is_over=is_over):
            self._tracker.log(report)
        if self._tracker.checkpoints:
            self._log_checkpoints()
        if (self._progress.metrics, self._progress.events) == before:
            return False
        self._flush()
        return True

    def finish(self, status: str) -> None:
        """End the tracked run. Raise what the tracker raises."""
        self._tracker.finish(status)
        self._save(sync=True)

    # -- what is new ----------------------------------------------------------------------------------------------

    def _new_reports(self, *, is_over: bool) -> Iterator[Report]:
        """Yield the reports in some lines that are new, and note the position after them."""
        lines, position = _whole_lines(self._paths.metrics, self._progress.metrics)
        is_read = False
        for line in lines:
            is_wanted = self._tracker.ranks == "all" or b'"rank":0,' in line  # lines of other ranks need no parsing
            record = record_in(line, f"a line of {self._paths.metrics}") if is_wanted else None
            if record is not None and (self._tracker.ranks == "all" or record["rank"] == 0):
                attempt = record["attempt"]
                if attempt not in self._first_steps and not is_read:
                    self._read_attempts(is_over=is_over)
                    is_read = True
                if attempt not in self._first_steps and not is_over:
                    break  # its ranks are still starting
                report = new_report(record, self._first_steps.get(attempt), self._progress.marks)
                if report is not None:
                    yield report
            position += len(line)
        self._progress.metrics = position

    def _read_attempts(self, *, is_over: bool) -> None:
        with contextlib.suppress(StorageError):  # a reader of a network file system may see a part of it
            manifest = read_manifest(self._paths.root)
            over = is_over or manifest.get("status") != "running"
            self._first_steps = first_steps(manifest.get("attempts", []), is_over=over)

    def _log_checkpoints(self) -> None:
        lines, position = _whole_lines(self._paths.events, self._progress.events)
        for line in lines:
            event = event_in(line)
            if event is not None and event["event"] == "checkpoint":
                self._log_checkpoint(event["name"], event["step"])
            position += len(line)
            self._progress.events = position

    def _log_checkpoint(self, name: str, step: int) -> None:
        checkpoint = Checkpoint(f"{self._location}/{name}", self._filesystem)
        try:
            if checkpoint.exists():
                self._tracker.checkpoint(checkpoint, step)
        except OSError:
            if checkpoint.exists():
                raise
            # else num_to_keep has allowed its deletion meanwhile

    # -- the progress ---------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._tracker.flush()
        self._save(sync=False)

    def _save(self, *, sync: bool) -> None:
        self._state_file.parent.mkdir(exist_ok=True)
        text = json.dumps({**self._progress.as_json(), "state": self._run.state}, indent=1)
        write_atomically(self._state_file, text.encode(), sync=sync)


def _whole_lines(path: Path, position: int) -> tuple[list[bytes], int]:
    """Return some lines of a file from a position on, and the position of the first of them.

    A line that is not written to its end is left out. If the file is shorter, it is another one: it is read from its
    start. A missing file has no lines.
    """
    try:
        with path.open("rb") as file:
            if position > file.seek(0, os.SEEK_END):
                position = 0
            file.seek(position)
            data = file.read(_CHUNK_BYTES)
            while data and b"\n" not in data and (more := file.read(_CHUNK_BYTES)):  # one very long line
                data += more
    except FileNotFoundError:
        return [], position
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True), position

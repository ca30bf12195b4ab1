"""The facts in the files of a run, for its page and for ``distrain show``. Runs in: anywhere."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from distrain.page.reports import DAMAGE, Reports
from distrain.storage import names
from distrain.storage.lines import MOST_OF_LINES, read_events, read_metrics
from distrain.storage.runs.details import checkpoints_made, checkpoints_of, error_of, evidence_of, verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from distrain.storage.runs.listing import Run
    from distrain.system.remote_path import RemotePath


class Facts:
    """The facts in the files of a run. A damaged or missing file costs its own part only. A note says so.

    folder: where the files are. rank: whose reports are read; None: those of all.

    Attributes: ``error``: the contents of error.json, ``events``, ``checkpoints``: those that are kept, ``made``: the
    events of all that were on storage, by name, ``in_memory``: that of the newest one if only hosts have it,
    ``evidence``: names of files, ``reports``, ``verdict``: a sentence, ``notes``: what is damaged or left out.
    """

    def __init__(self, run: Run, folder: Path | RemotePath, rank: int | None = 0) -> None:
        self.run = run
        self.notes = [run.problem] if run.problem else []
        self.reports = Reports(run.attempts)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            self.error = error_of(folder)
            self.events = self._all_of(lambda: read_events(folder / names.EVENTS))
            self.checkpoints = self._all_of(lambda: checkpoints_of(folder))
            self.evidence = self._all_of(lambda: evidence_of(folder))
            self._all_of(lambda: self._add_reports(folder / names.METRICS, rank))
        self.made, self.in_memory = checkpoints_made(run, self.events)
        self.verdict = verdict(run, self.reports.last, self.events, self.error)
        texts = [str(warning.message) for warning in warned]
        self.notes += [text for text in texts if not text.startswith("skipped line")]
        if damaged := sum(text.startswith("skipped line") for text in texts):
            self.notes.append(f"{damaged:,} damaged lines of {names.METRICS} were skipped")

    def _all_of(self, read: Callable[[], Iterable[Any]]) -> list[Any]:
        try:
            return list(read())
        except OSError as error:
            self.notes.append(str(error))
            return []

    def _add_reports(self, path: Path | RemotePath, rank: int | None) -> Iterable[Any]:
        for record in read_metrics(path, rank=rank, most=MOST_OF_LINES):
            try:
                self.reports.add(record)
            except DAMAGE:
                warnings.warn("skipped line", stacklevel=1)
        return ()

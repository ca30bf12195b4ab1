"""The traces of a trial: notes of the probes, metrics, attempts and checkpoints. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.drilling.probe import MARK
from distrain.storage.checkpoint import MANIFEST_FILE
from distrain.storage.lines import read_metrics
from distrain.storage.paths import RunPaths, read_manifest
from distrain.storage.runs.listing import run_at
from distrain.storage.runs.logs import attempts_with_logs, log_files
from distrain.system.text import flatten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from distrain.drilling.order import Unit

    Note = dict[str, Any]


LEAST = 3
"""The units without which there is too little to compare."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a trial.

    first, offset: the reports, and the steps, before it. notes: those of each rank, in order.
    metrics: by rank and number of the report over the whole run.
    """

    number: int = 0
    first: int = 0
    offset: int = 0
    ended: float | None = None
    notes: Mapping[int, list[Note]] = field(default_factory=dict)
    metrics: Mapping[tuple[int, int], dict[str, Any]] = field(default_factory=dict)

    def of(self, what: str, rank: int | None = None) -> list[Note]:
        """Return the notes of a kind, of one rank or of all."""
        notes = self.notes.values() if rank is None else [self.notes.get(rank, [])]
        return [note for each in notes for note in each if note["what"] == what]

    @property
    def rank(self) -> int:
        """The lowest rank that reports; 0 if none does."""
        return min((rank for rank in self.notes if self.of("report", rank)), default=0)

    @property
    def unit(self) -> Unit:
        """The unit that can be counted: reports, if there are enough."""
        return "report" if len(self.of("report", self.rank)) >= LEAST else "step"

    def done(self, unit: Unit) -> int:
        """Return how many units of the whole run are done; of steps, those of this attempt."""
        return len(self.of(unit, self.rank)) + (self.first if unit == "report" else 0)

    def saves(self, unit: Unit) -> list[int]:
        """Return after how many units something was saved: with a report or, if steps are counted, by torch.save()."""
        found, count = [], 0
        for note in self.notes.get(self.rank, []):
            count += note["what"] == unit
            if note.get("saves") or (note["what"] == "save" and unit == "step"):
                found.append(count)
        return list(dict.fromkeys(found))

    def costs(self, unit: Unit) -> list[tuple[float, float]]:
        """Return when each checkpoint was saved, and how long that took."""
        found, seconds = [], 0.0
        for note in self.notes.get(self.rank, []):
            if note["what"] == "save" or note.get("saves"):
                seconds += note["seconds"]
            if seconds and (note.get("saves") or (note["what"] == "step" and unit == "step")):
                found.append((note["time"], seconds))
                seconds = 0.0
        return found

    def steps_before(self, reports: int) -> int:
        """Return the steps that had ended after so many reports of this attempt."""
        ends = [int(note["steps"]) for note in self.of("report", self.rank)[:reports]]
        return ends[-1] if ends else 0

    def rows(self) -> dict[tuple[int, int, int], tuple[int, dict[str, Any]]]:
        """Return the numbers and metrics of reports by rank, steps of the whole run, and place among equal ones.

        Numbers alone do not tell which reports belong together: one that is made after a signal is an additional one.
        Without steps, they have to do.
        """
        found: dict[tuple[int, int, int], tuple[int, dict[str, Any]]] = {}
        for rank in self.notes:
            counts: dict[int, int] = {}
            for index, note in enumerate(self.of("report", rank)):
                number = self.first + index + 1
                steps = self.offset + note["steps"] if self.of("step", rank) else number
                place = counts[steps] = counts.get(steps, 0) + 1
                if (rank, number) in self.metrics:
                    found[rank, steps, place] = number, self.metrics[rank, number]
        return found


@dataclass(frozen=True, slots=True)
class Journal:
    """All of a trial.

    checkpoints: by the number of reports before them. hosts: those of the first attempt, with their ranks.
    """

    attempts: list[Attempt]
    checkpoints: Mapping[int, Path]
    hosts: Mapping[str, list[int]]
    has_finished: bool

    @property
    def resumed(self) -> Attempt:
        """The last attempt that has trained, or else the first."""
        return [self.attempts[0], *(one for one in self.attempts if one.of("report") or one.of("step"))][-1]


def read_journal(root: Path) -> Journal:
    """Read what there is of a run, which may be under way."""
    manifest, paths, logs = read_manifest(root), RunPaths(root), _logs(root)
    metrics: dict[int, list[dict[str, Any]]] = {}
    for line in read_metrics(paths.metrics, rank=None):
        metrics.setdefault(line["attempt"], []).append(line)
    attempts: list[Attempt] = []
    for one in manifest.get("attempts", []):
        number, first = one["attempt"], one.get("first_step", 0)
        rows = {(line["rank"], first + line["index"]): flatten(line["metrics"]) for line in metrics.get(number, [])}
        before = [each for each in attempts if each.first < first <= each.done("report")]
        offset = before[-1].offset + before[-1].steps_before(first - before[-1].first) if before else 0
        attempts.append(Attempt(number, first, offset, one.get("ended"), logs.get(number, {}), rows))
    return Journal(
        attempts=attempts or [Attempt()],
        checkpoints=dict(_checkpoints(paths)),
        hosts=manifest["attempts"][0]["hosts"] if attempts else {},
        has_finished=manifest.get("status") == "finished",
    )


def _checkpoints(paths: RunPaths) -> Iterator[tuple[int, Path]]:
    """Yield the checkpoints with the numbers of their reports, except for those that are being deleted."""
    for path in paths.checkpoints():
        with contextlib.suppress(FileNotFoundError):
            yield json.loads((path / MANIFEST_FILE).read_text())["step"], path


def _logs(root: Path) -> dict[int, dict[int, list[Note]]]:
    """Return the notes by attempt and rank."""
    run = run_at(root)
    return {
        attempt: {rank: _notes(Path(str(file))) for rank, file in log_files(run, attempt).items()}
        for attempt in attempts_with_logs(run)
    }


def _notes(file: Path) -> list[Note]:
    found = []
    for line in file.read_bytes().split(b"\n"):
        if line.startswith(MARK.encode()):
            with contextlib.suppress(ValueError):  # another process has written in between, or the line is not complete
                found.append(json.loads(line.removeprefix(MARK.encode())))
    return found

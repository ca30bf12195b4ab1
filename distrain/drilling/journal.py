"""The traces of a trial: notes of the probes, metrics, attempts and checkpoints. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.drilling.probe import MARK
from distrain.storage.runs.details import checkpoints_of, reports_of
from distrain.storage.runs.listing import FINISHED, run_at
from distrain.storage.runs.logs import log_files
from distrain.system.text import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    run = run_at(root)
    if not run.manifest:
        return Journal([Attempt()], {}, {}, has_finished=False)
    metrics: dict[int, dict[tuple[int, int], dict[str, Any]]] = {}
    for line in reports_of(run, rank=None):
        metrics.setdefault(line["attempt"], {})[line["rank"], line["step"]] = flatten(line["metrics"])
    attempts: list[Attempt] = []
    for one in run.attempts:
        number, first = one["attempt"], one.get("first_step", 0)
        before = [each for each in attempts if each.first < first <= each.done("report")]
        offset = before[-1].offset + before[-1].steps_before(first - before[-1].first) if before else 0
        notes = {rank: _notes(Path(str(file))) for rank, file in log_files(run, number).items()}
        attempts.append(Attempt(number, first, offset, notes, metrics.get(number, {})))
    return Journal(
        attempts=attempts or [Attempt()],
        checkpoints={saved.step: Path(str(saved.path)) for saved in checkpoints_of(root)},
        hosts=run.attempts[0]["hosts"] if attempts else {},
        has_finished=run.state == FINISHED,
    )


def read_notes(folder: Path, *, has_finished: bool) -> Journal:
    """Read what there is of a command, whose processes have left a file each."""
    attempts = []
    for number, path in enumerate(sorted(folder.glob("*"))):
        notes: dict[int, list[Note]] = {}
        for file in path.iterdir():
            notes.setdefault(int(file.name.partition(".")[0]), []).extend(_notes(file))
        ordered = {rank: sorted(found, key=lambda note: float(note["time"])) for rank, found in sorted(notes.items())}
        attempts.append(Attempt(number, notes=ordered))
    hosts = {"localhost": list(attempts[0].notes)} if attempts else {}
    return Journal(attempts or [Attempt()], {}, hosts, has_finished=has_finished)


def _notes(file: Path) -> list[Note]:
    found = []
    for line in file.read_bytes().split(b"\n"):
        if line.startswith(MARK.encode()):
            with contextlib.suppress(ValueError):  # another process has written in between, or the line is not complete
                found.append(json.loads(line.removeprefix(MARK.encode())))
    return found

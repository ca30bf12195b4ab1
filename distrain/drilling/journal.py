"""What a trial has left: the notes of the probes, metrics, attempts and checkpoints. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.drilling.order import REPORTS, STEPS
from distrain.drilling.probe import MARK
from distrain.storage.lines import read_metrics
from distrain.storage.paths import RunPaths, read_manifest
from distrain.storage.runs.listing import run_at
from distrain.storage.runs.logs import attempts_with_logs, log_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Note = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a trial.

    first: the reports before it. checkpoint: the one that it has started from. failure: why it has ended.
    notes: those of each rank, in order. metrics: by rank and number of the report over the whole run.
    """

    number: int
    first: int = 0
    checkpoint: str | None = None
    failure: str | None = None
    started: float = 0.0
    ended: float | None = None
    notes: Mapping[int, list[Note]] = field(default_factory=dict)
    metrics: Mapping[tuple[int, int], dict[str, Any]] = field(default_factory=dict)

    def of(self, what: str, rank: int | None = None) -> list[Note]:
        """Return the notes of a kind, of one rank or all."""
        of_ranks = [self.notes.get(rank, [])] if rank is not None else list(self.notes.values())
        return [note for notes in of_ranks for note in notes if note["what"] == what]

    def steps(self, rank: int) -> list[Note]:
        """Return the notes of the training steps of a rank."""
        return self.of("step", rank)

    @property
    def rank(self) -> int:
        """The lowest rank that reports; 0 if none does."""
        return min((rank for rank in self.notes if self.of("report", rank)), default=0)

    def done(self, unit: str) -> int:
        """Return how many reports, or steps, there have been so far."""
        count = len(self.of({REPORTS: "report", STEPS: "step"}[unit], self.rank))
        return count + (self.first if unit == REPORTS else 0)

    def saves(self, unit: str) -> list[int]:
        """Return after how many reports, or steps, something was saved."""
        found, count = [], self.first if unit == REPORTS else 0
        for note in self.notes.get(self.rank, []):
            count += note["what"] == {REPORTS: "report", STEPS: "step"}[unit]
            if note.get("saves") if unit == REPORTS else note["what"] == "save":
                found.append(count)
        return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Journal:
    """All of a trial.

    checkpoints: by the number of reports before them. hosts: those of the first attempt, with their ranks.
    """

    attempts: list[Attempt]
    checkpoints: Mapping[int, Path]
    hosts: Mapping[str, list[int]]
    has_finished: bool
    error: str

    @property
    def resumed(self) -> Attempt:
        """The last attempt that has trained."""
        trained = [one for one in self.attempts if one.metrics or one.of("step")]
        return trained[-1] if trained else self.attempts[-1]


def read_journal(root: Path) -> Journal:
    """Read what there is of a run, which may be under way."""
    manifest = read_manifest(root)
    paths, metrics = RunPaths(root), list(_metrics(root))
    logs, began = _logs(root), manifest.get("attempts", [])
    attempts = [
        Attempt(
            number=one["attempt"],
            first=one.get("first_step", 0),
            checkpoint=one.get("checkpoint"),
            failure=one.get("failure"),
            started=one["started"],
            ended=one.get("ended"),
            notes=logs.get(one["attempt"], {}),
            metrics={
                (line["rank"], one.get("first_step", 0) + line["index"]): line["metrics"]
                for line in metrics
                if line["attempt"] == one["attempt"]
            },
        )
        for one in began
    ]
    stored = {json.loads((path / ".manifest.json").read_text())["step"]: path for path in paths.checkpoints()}
    error = ""
    with contextlib.suppress(OSError, ValueError, KeyError):
        error = json.loads(paths.error_text.read_text())["message"]
    return Journal(
        attempts=attempts or [Attempt(0)],
        checkpoints=stored,
        hosts=began[0]["hosts"] if began else {},
        has_finished=manifest.get("status") == "finished",
        error=error,
    )


def _metrics(root: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        yield from read_metrics(RunPaths(root).metrics, rank=None)


def _logs(root: Path) -> dict[int, dict[int, list[Note]]]:
    """Return the notes by attempt and rank."""
    run = run_at(root)
    found: dict[int, dict[int, list[Note]]] = {}
    for attempt in attempts_with_logs(run):
        for rank, file in log_files(run, attempt).items():
            lines = file.read_bytes().decode(errors="replace").split("\n")
            found.setdefault(attempt, {})[rank] = [
                note for line in lines if line.startswith(MARK) and (note := _note(line)) is not None
            ]
    return found


def _note(line: str) -> Note | None:
    try:
        note: Note = json.loads(line.removeprefix(MARK))
    except ValueError:  # another process has written in between
        return None
    return note

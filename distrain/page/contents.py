"""The facts about a run in its directory, as far as they are there. Runs in: anywhere.

A damaged or missing file costs its own facts only. A note for the page says so.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.errors import StorageError
from distrain.storage.checkpoint import MANIFEST_FILE
from distrain.storage.names import STATUSES
from distrain.storage.paths import RunPaths, is_copy
from distrain.storage.records import read_events
from distrain.storage.runs.listing import DAMAGED, RUNNING, run_at
from distrain.system.stacks import summarize_stacks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distrain.system.remote_path import RemotePath

_NAMES = RunPaths(Path())
_MOST_STACKS = 2000
_LONGEST_STACK = 64 << 10
_LOG_TAIL = 8 << 10
_MOST_EVENTS = 100_000
_FAILED_RANK = re.compile(r"rank (\d+) on (.+?): ")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt. Times are seconds since 1970; None is unknown, or has not happened.

    first_step: reports that the checkpoint includes from which it began; None in runs of early versions.
    """

    number: int
    started: float
    training: float | None = None
    ended: float | None = None
    hosts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    checkpoint: str | None = None
    first_step: int | None = None
    failure: str | None = None

    @property
    def failed_host(self) -> str | None:
        """The host of the rank that failed."""
        found = _FAILED_RANK.match(self.failure or "")
        return found[2] if found and found[2] in self.hosts else None


@dataclass(frozen=True, slots=True)
class Hang:
    """A time in which no rank made progress."""

    since: float
    until: float


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is there, or that was there. None is unknown.

    seconds: from the first rank's report to the commit. metrics: a few of those that it was reported with.
    """

    name: str
    time: float | None = None
    attempt: int | None = None
    step: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    kept: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Everything that the page shows of a run, except its reports.

    state: that of ``listing.Run``. stacks: by attempt, lines that say where ranks were that had to be killed.
    notes: lines about files that could not be read.
    """

    name: str
    location: str
    manifest: Mapping[str, Any]
    state: str
    started: float | None
    updated: float | None
    attempts: tuple[Attempt, ...]
    hangs: tuple[Hang, ...]
    has_events: bool
    checkpoints: tuple[SavedCheckpoint, ...]
    error: Mapping[str, Any]
    stacks: Mapping[int, list[str]]
    log_tail: list[str]
    notes: list[str]
    made: float

    @property
    def is_live(self) -> bool:
        """True if a process trains now."""
        return self.state == RUNNING


def read_facts(run: Path | RemotePath) -> RunFacts:
    """Read the small files of a run. Raise StorageError if there is neither a manifest nor a report."""
    listed = run_at(run)
    manifest, state, notes = listed.manifest, listed.state, [listed.problem] if listed.problem else []
    if not manifest and state != DAMAGED and not (run / _NAMES.metrics.name).exists():
        raise StorageError(f"{run} is not a run directory: {listed.problem or f'it has no {_NAMES.manifest.name}'}")
    attempts = _attempts(manifest)
    events = _events(run, notes)
    error = _json(run, _NAMES.error_text.name, notes)
    stacks = _stacks(run) if isinstance(run, Path) else {}
    needs_log = state not in STATUSES and not error
    return RunFacts(
        name=text(manifest.get("name")) or run.name,
        location=str(run),
        manifest=manifest,
        state=state,
        started=number(manifest.get("started")),
        updated=number(manifest.get("updated")),
        attempts=attempts,
        hangs=_hangs(events),
        has_events=bool(events),
        checkpoints=_checkpoints(run, events, notes),
        error=error,
        stacks=stacks,
        log_tail=_log_tail(run, attempts[-1].number) if needs_log and attempts and isinstance(run, Path) else [],
        notes=notes,
        made=time.time(),
    )


def number(value: object) -> float | None:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: object) -> int | None:
    """Return an integer, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text(value: object) -> str | None:
    """Return a text that is not empty, or None for anything else."""
    return value if isinstance(value, str) and value else None


def mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON object, ``{}`` for anything else."""
    return value if isinstance(value, dict) else {}


def items(value: object) -> list[Any]:
    """Return a JSON array, ``[]`` for anything else."""
    return value if isinstance(value, list) else []


def _json(run: Path | RemotePath, name: str, notes: list[str]) -> Mapping[str, Any]:
    """Return the object in a file, ``{}`` if there is none."""
    try:
        value = json.loads((run / name).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{name} holds no JSON object")
    return mapping(value)


def _attempts(manifest: Mapping[str, Any]) -> tuple[Attempt, ...]:
    found = []
    for fields in map(mapping, items(manifest.get("attempts"))):
        started, which = number(fields.get("started")), whole(fields.get("attempt"))
        if started is None or which is None:
            continue
        hosts = {
            host: tuple(rank for rank in map(whole, items(ranks)) if rank is not None)
            for host, ranks in mapping(fields.get("hosts")).items()
        }
        training, ended = number(fields.get("training")), number(fields.get("ended"))
        first_step, failure = whole(fields.get("first_step")), text(fields.get("failure"))
        found.append(
            Attempt(which, started, training, ended, hosts, text(fields.get("checkpoint")), first_step, failure)
        )
    return tuple(sorted(found, key=lambda attempt: attempt.started))


def _events(run: Path | RemotePath, notes: list[str]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    try:
        for event in read_events(run / _NAMES.events.name):
            if number(event["time"]) is not None:
                events.append(event)
            if len(events) == _MOST_EVENTS:
                notes.append(f"{_NAMES.events.name} is very long: only its first {_MOST_EVENTS:,} lines are shown")
                break
    except OSError as error:
        notes.append(f"{_NAMES.events.name} cannot be read: {error}")
    return events


def _hangs(events: Iterable[Mapping[str, Any]]) -> tuple[Hang, ...]:
    spans = ((number(event.get("since")), event["time"]) for event in events if event["event"] == "hang")
    return tuple(Hang(since, until) for since, until in spans if since is not None and since < until)


def _checkpoints(
    run: Path | RemotePath, events: Iterable[Mapping[str, Any]], notes: list[str]
) -> tuple[SavedCheckpoint, ...]:
    """Return the checkpoints of the events and of the directory, the oldest first."""
    manifests = dict(_manifests(run, notes))
    found = {}
    for event in events:
        name = text(event.get("name"))
        if event["event"] == "checkpoint" and name is not None:
            found[name] = SavedCheckpoint(
                name,
                time=event["time"],
                attempt=whole(event.get("attempt")),
                step=whole(event.get("step")),
                bytes=whole(event.get("bytes")),
                seconds=number(event.get("seconds")),
                kept=name in manifests,
                metrics=mapping(manifests.get(name, {}).get("metrics")),
            )
    for name, fields in manifests.items():
        if name not in found:
            sizes = [whole(mapping(fact).get("size")) or 0 for fact in mapping(fields.get("files")).values()]
            metrics, step = mapping(fields.get("metrics")), whole(fields.get("step"))
            found[name] = SavedCheckpoint(
                name, time=fields["_time"], step=step, bytes=sum(sizes), kept=True, metrics=metrics
            )
    return tuple(sorted(found.values(), key=lambda saved: (saved.time or 0.0, saved.name)))


def _manifests(run: Path | RemotePath, notes: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the manifests of the checkpoints in the directory, with the time of each as ``_time``."""
    found = []
    try:
        names = sorted(path.name for path in run.iterdir() if path.is_dir()) if isinstance(run, Path) else run.names()
    except OSError as error:
        notes.append(f"the checkpoints cannot be listed: {error}")
        return []
    for name in names:
        if name.startswith((".", "damaged-")):
            continue
        manifest = run / name / MANIFEST_FILE
        try:
            fields = json.loads(manifest.read_bytes())
            written = manifest.stat().st_mtime if isinstance(manifest, Path) else None
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, RecursionError) as error:
            notes.append(f"{name} is damaged: {error}")
            continue
        if isinstance(fields, dict) and not is_copy(name, fields):
            found.append((name, {**fields, "_time": written}))
    return found


def _stacks(run: Path) -> dict[int, list[str]]:
    """Return for each attempt the locations of the ranks whose stacks were kept, most ranks first."""
    found: dict[int, list[str]] = {}
    read = 0
    for folder in sorted(run.glob("stacks/attempt_*")):
        texts: dict[int, str] = {}
        for path in sorted(folder.glob("rank_*.txt")):
            rank = path.stem.removeprefix("rank_")
            if rank.isdecimal() and read < _MOST_STACKS:
                texts[int(rank)] = _beginning(path)
                read += 1
        which = folder.name.removeprefix("attempt_")
        if texts and which.isdecimal():
            found[int(which)] = summarize_stacks(texts)
    return found


def _beginning(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST_STACK).decode(errors="replace")
    except OSError:
        return ""


def _log_tail(run: Path, attempt: int) -> list[str]:
    """Return the last lines of rank 0's output."""
    try:
        with RunPaths(run).log(attempt, 0).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_TAIL))
            return file.read().decode(errors="replace").splitlines()[-20:]
    except OSError:
        return []

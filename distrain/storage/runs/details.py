"""The facts in the files of a run: its checkpoints, reports and error, and a sentence about it all. Runs in: anywhere.

A damaged file costs its own part only. A warning says so.
"""

from __future__ import annotations

import shlex
import warnings
from itertools import islice
from typing import TYPE_CHECKING, Any

from distrain.errors import StorageError
from distrain.storage import names
from distrain.storage.checkpoint import MANIFEST_FILE
from distrain.storage.commit import CommittedCheckpoint, committed
from distrain.storage.lines import parse_json, read_file, read_metrics
from distrain.storage.ownership import MOST_NAMES, list_names
from distrain.storage.paths import DAMAGED, is_copy, number_of
from distrain.storage.runs.listing import ENDED, FAILED, KILLED, RUNNING, STOPPED, Run, number_in
from distrain.system.remote_path import RemotePath
from distrain.system.text import broken, count, duration, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_Event = dict[str, Any]
_MOST_READS = 10
"""The number of tries to list the checkpoints of a run that deletes some meanwhile."""
_LONGEST_REASON, _LONGEST_HANG = 500, 2000
_PROGRAMS = {
    "/distrain/launch.py": ("python", "-m", "distrain.launch"),
    "/distrain/__main__.py": ("distrain",),
    "/bin/distrain": ("distrain",),
}
"""By the end of ``sys.argv[0]``, what the user has typed."""


# -- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoints_of(run: Path | RemotePath) -> list[CommittedCheckpoint]:
    """Return the checkpoints of a run, the oldest first, without copies. Warn of damaged ones. Raise OSError."""
    for _ in range(_MOST_READS):
        found, some_deleted = _checkpoints_now(run)
        if not some_deleted:  # otherwise the run is still training, and has replaced them by others
            break
    return sorted(found, key=lambda saved: saved.index if saved.index >= 0 else number_of(saved.path.name))


def checkpoints_made(run: Run, events: Sequence[_Event]) -> tuple[dict[str, _Event], _Event | None]:
    """Return the events of checkpoints on storage by name, also of those deleted since, and of one in memory or None.

    That is the newest one of a running run, if its files are in the memory of the hosts only.
    """
    made = {str(event.get("name")): event for event in events if event["event"] == "checkpoint"}
    stored = {event.get("name") for event in events if event["event"] == "stored"}
    on_storage = {name: event for name, event in made.items() if event.get("tier") != "memory" or name in stored}
    newest = max(made, key=lambda name: number_in(made[name].get("index")) or 0.0, default=None)
    is_lost = run.state != RUNNING or newest is None or newest in on_storage
    return on_storage, None if is_lost else made[str(newest)]


def _checkpoints_now(run: Path | RemotePath) -> tuple[list[CommittedCheckpoint], bool]:
    """Return the checkpoints, and whether some were deleted while they were read."""
    found, some_deleted = [], False
    local = None if isinstance(run, RemotePath) else run
    for name in run.names() if isinstance(run, RemotePath) else list_names(run, run):
        if name.startswith((".", DAMAGED)):
            continue
        folder = run / name
        try:
            manifest = parse_json(read_file(folder / MANIFEST_FILE, local))
            if not is_copy(name, manifest):
                found.append(committed(folder, manifest))
        except (FileNotFoundError, NotADirectoryError):
            if number_of(name) < 0 or isinstance(folder, RemotePath):  # not a checkpoint
                continue
            some_deleted = some_deleted or not folder.exists()
            if folder.exists():
                warnings.warn(f"skipped a checkpoint: {folder} is damaged: it has no {MANIFEST_FILE}", stacklevel=4)
        except StorageError as error:
            warnings.warn(f"skipped a checkpoint: {error}", stacklevel=4)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            if isinstance(error, OSError) and isinstance(run, RemotePath):
                raise
            text = f"skipped a checkpoint: {folder} is damaged, its manifest cannot be read ({error})"
            warnings.warn(text, stacklevel=4)
    return found, some_deleted


# -- reports ---------------------------------------------------------------------------------------------------------


def reports_of(run: Run, rank: int | None = 0) -> Iterator[dict[str, Any]]:
    """Return the reports of one rank or (None) of all, each with its ``step`` over the whole run. Raise OSError."""
    return run.with_steps(read_metrics(run.location / names.METRICS, rank=rank))


# -- the command -----------------------------------------------------------------------------------------------------


def command_of(run: Run) -> str:
    """Return the command line of a run, as it can be typed."""
    argv = run.manifest.get("argv")
    if not isinstance(argv, list) or not argv:
        return ""
    program = str(argv[0])
    for end, typed in _PROGRAMS.items():
        if program.endswith(end):
            return shlex.join([*typed, *map(str, argv[1:])])
    return shlex.join(["python", *map(str, argv)] if program.endswith(".py") else map(str, argv))


# -- the end ---------------------------------------------------------------------------------------------------------


def error_of(run: Path | RemotePath) -> dict[str, Any]:
    """Return the contents of error.json: why fit() has raised an error. ``{}`` if there is none."""
    try:
        error = parse_json(read_file(run / names.ERROR_TEXT))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as damage:
        warnings.warn(f"{names.ERROR_TEXT} cannot be read: {damage}", stacklevel=2)
        return {}
    return error if isinstance(error, dict) else {}


def evidence_of(run: Path | RemotePath) -> list[str]:
    """Return the names of the files in the evidence folder, such as ``attempt_0/stacks/rank_1.txt``. Raise OSError."""
    folder, found = run / names.EVIDENCE, [""]
    for _ in range(0 if isinstance(folder, RemotePath) else 3):  # attempts, kinds and files
        inner = (f"{above}/{name}".lstrip("/") for above in found for name in list_names(f"{folder}/{above}", str(run)))
        found = list(islice(inner, MOST_NAMES))
    if isinstance(folder, RemotePath):
        found = list(folder.files())
    ends = tuple(names.EVIDENCE_SUFFIXES.values())
    return sorted(name for name in found if name.startswith("attempt_") and name.endswith(ends))


def failures_in(error: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the failed ranks that error.json names, the culprit first."""
    found = error.get("failures")
    return [failure for failure in found if isinstance(failure, dict)] if isinstance(found, list) else []


def verdict(run: Run, last: Mapping[str, Any] | None, events: Sequence[_Event], error: Mapping[str, Any]) -> str:
    """Return one sentence about the state of a run: how far it is or has come, and which rank failed, where and why.

    last: rank 0's last report, with its ``step``. events: all of the run. error: the contents of error.json.
    """
    if run.state not in (RUNNING, *ENDED):
        return printable(f"{run.state}: {run.problem}" if run.problem else run.state)
    lasted = duration(run.until - run.began)
    text = f"{run.state} {'for' if run.state == RUNNING else 'after'} {lasted}{_where(last)}"
    if run.state == KILLED:
        text += ": the process that called fit() was killed, or its machine crashed"
    elif run.state in (FAILED, STOPPED) and (why := _reason(run, error)):
        text += f": {why}"
    if (hang := hang_of(run, last, events)) is not None:
        how = "it has hung" if run.state == RUNNING else "it hung"
        text += f"; {how} for {duration(run.until - hang['since'])}: {str(hang['text'])[:_LONGEST_HANG]}"
    text += broken(last["metrics"]) if last else ""
    if (restarts := len(run.attempts_now) - 1) > 0:
        text += f", after {count(restarts, 'restart')}"
    if run.state in (STOPPED, KILLED):
        text += f"; it continues if you start it again with --name {run.name}"
    return printable(text)


def hangs_in(events: Sequence[_Event]) -> list[_Event]:
    """Return the events that tell of the beginning or the end of a hang."""
    return [event for event in events if event["event"] in ("hang_began", "hang") and "since" in event]


def hang_of(run: Run, last: Mapping[str, Any] | None, events: Sequence[_Event]) -> _Event | None:
    """Return the event of a hang that lasts, or in which the run has ended; its ``text`` says who is stuck."""
    found = hangs_in(events)
    if not found or not found[-1].get("text") or (found[-1]["event"] == "hang" and run.state == RUNNING):
        return None
    return None if last is not None and last["time"] > found[-1]["since"] else found[-1]


def _where(last: Mapping[str, Any] | None) -> str:
    if last is None:
        return ", without a report"
    if progress := last.get("progress"):
        return f" at step {progress[0]:,} of {progress[1]:,} ({progress[0] / progress[1]:.0%})"
    return f" at report {last['step']:,}"


def _reason(run: Run, error: Mapping[str, Any]) -> str:
    """Return why the last attempt has ended, such as which rank failed, where and why; else why fit() has."""
    ends = [str(attempt["failure"]) for attempt in run.attempts if attempt.get("failure")]
    return (ends[-1] if ends else str(error.get("message") or "").partition("\n")[0])[:_LONGEST_REASON].rstrip(".")

"""The differences between runs. Runs in: anywhere."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from distrain.storage.runs.details import extremes_of, reports_of
from distrain.system.text import flatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.storage.runs.listing import Run

_SETTINGS = (
    *("script", "train_loop_config", "scaling_config", "failure_config", "checkpoint_config", "run_config"),
    *("git", "versions", "distrain", "python", "directory", "host"),
)
"""The parts of run.json that are compared."""


_PROGRAMS = {
    "/distrain/launch.py": ("python", "-m", "distrain.launch"),
    "/distrain/__main__.py": ("distrain",),
    "/bin/distrain": ("distrain",),
}
"""By the end of ``sys.argv[0]``, what the user has typed."""


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


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the settings and metrics that differ, each with its value for each run; None where a run has none.

    A metric of rank 0 has its last, its least and its largest value. Raise OSError.
    """
    tables = [_settings(run) | _metrics(run) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = {name: [table.get(name) for table in tables] for name in names}
    return {name: values for name, values in rows.items() if len({json.dumps(item) for item in values}) > 1}


def _settings(run: Run) -> dict[str, Any]:
    chosen = {name: run.manifest[name] for name in _SETTINGS if run.manifest.get(name) is not None}
    return {**flatten(chosen), "command": command_of(run), "hosts": ", ".join(run.hosts), "ranks": run.ranks}


def _metrics(run: Run) -> dict[str, Any]:
    reports = list(reports_of(run))
    found: dict[str, Any] = {"step": reports[-1]["step"]} if reports else {}
    last = flatten(reports[-1]["metrics"]) if reports else {}
    for name, extreme in extremes_of(reports).items():
        found |= {f"{name} (last)": last.get(name), f"{name} (least)": extreme.least}
        found[f"{name} (largest)"] = extreme.largest
    return found

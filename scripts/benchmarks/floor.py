"""Compare distrain with the floor: one process that imports torch and forks the ranks, with nothing around them."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contained import RunFailedError, run_contained
from benchmarks.launchers import DISTRAIN, PROGRAMS, environment_of_runs
from benchmarks.table import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FLOOR = "floor"
"""Name of the measure on the command line, and of the row to compare with."""
FLOOR_WORKERS, ALL_FLOOR_WORKERS = (2, 8), (2, 8, 32, 128)
TITLES = {"cpu": "s", "cold": "s", "restart": "s", "second": "s", "private": "MB"}
"""Unit of each figure. The titles of the measures begin with "floor: "."""
BOUNDS = {("cpu", 8): 1.1, ("cpu", 128): 1.3, **{("restart", workers): 1.5 for workers in ALL_FLOOR_WORKERS}}
"""Limits for distrain, as multiples of the floor, by figure and number of workers."""


def measure_floor(workers: int, runs: int, *, timeout_s: float, progress: Callable[[str], None]) -> list[Row]:
    """Run both in turn, ``runs`` times."""
    rows = {
        (name, launcher): Row(measure=f"floor: {name}", workers=workers, launcher=launcher, unit=unit, values=[])
        for name, unit in TITLES.items()
        for launcher in (FLOOR, DISTRAIN)
    }
    for index in range(runs):
        progress(f"floor, {workers} workers, run {index + 1} of {runs}")
        found, failures = _run_once(workers, timeout_s)
        for key, row in rows.items():
            row.values.append(found.get(key))
            row.failures += failures
    return list(rows.values())


def _run_once(workers: int, timeout_s: float) -> tuple[dict[tuple[str, str], float], list[str]]:
    """Return the figures by name and launcher, and why figures are missing."""
    try:
        floor, fit, second, restart = (_run(role, workers, timeout_s) for role in ("floor", "fit", "second", "restart"))
    except RunFailedError as error:
        return {}, [str(error)]
    of_floor = floor | {"second": floor["restart"]}
    ours = fit | second | restart | {"cpu": fit["cpu"], "cold": fit["cold"]}
    return {
        (name, launcher): values[name] for launcher, values in ((FLOOR, of_floor), (DISTRAIN, ours)) for name in TITLES
    }, []


def _run(role: str, workers: int, timeout_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        finished = run_contained(
            [sys.executable, str(PROGRAMS / "floor.py"), role, str(workers)],
            out=Path(folder),
            environment={**environment_of_runs(0), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            timeout_s=timeout_s,
        )
        try:
            found: dict[str, Any] = json.loads((finished.out / "output").read_text().splitlines()[-1])
        except (ValueError, IndexError):
            raise RunFailedError(finished.how_it_ended()) from None
    found.setdefault("cpu", finished.cpu_s)
    if "first_at" in found:
        found["cold"] = found["first_at"] - finished.begun
    return found


def floor_bounds(rows: Sequence[Row]) -> list[str]:
    """Return one line per limit in BOUNDS: the ratio that was measured, and the limit."""
    found = {(row.measure, row.workers, row.launcher): row for row in rows}
    lines = []
    for (name, workers), bound in BOUNDS.items():
        ours, floor = (found.get((f"floor: {name}", workers, launcher)) for launcher in (DISTRAIN, FLOOR))
        if ours is not None and (ratio := ours.ratio_to(floor)) is not None:
            lines.append(f"{DISTRAIN}, {name} of {workers} workers: {ratio:.2f} x (floor), {bound:g} x at most wanted")
    return lines

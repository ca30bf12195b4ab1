"""Measure what checkpoints in memory cost, compared with memcpy and with checkpoints on disk."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contained import RunFailedError, run_contained
from benchmarks.launchers import DISTRAIN, PROGRAMS, environment_of_runs
from benchmarks.table import Row

if TYPE_CHECKING:
    from collections.abc import Callable

IN_MEMORY = "in-memory"
"""Name of the measure on the command line."""
IN_MEMORY_WORKERS = (4,)
MEGABYTES = 256
MEMCPY = "memcpy into /dev/shm"
BLOCKED = {mode: f"report() blocks, {mode}" for mode in ("MEMORY", "SYNC", "ASYNC")}
STEPS = {"none": "DDP steps", "MEMORY": "DDP steps, MEMORY"}
MOST_OF_MEMCPY = 1.2


def measure_in_memory(
    workers: int, runs: int, folder: Path, *, timeout_s: float, progress: Callable[[str], None]
) -> list[Row]:
    """Run distrain ``runs`` times. folder: on the disk for SYNC and ASYNC."""
    units = dict.fromkeys((MEMCPY, *BLOCKED.values()), "ms") | dict.fromkeys(STEPS.values(), "/s")
    rows = {
        title: Row(measure=title, workers=workers, launcher=DISTRAIN, unit=unit, values=[])
        for title, unit in units.items()
    }
    for index in range(runs):
        progress(f"checkpoints in memory, run {index + 1} of {runs}")
        try:
            with (
                tempfile.TemporaryDirectory(prefix="b-", dir="/tmp", ignore_cleanup_errors=True) as out,
                tempfile.TemporaryDirectory(prefix="benchmark-", dir=folder, ignore_cleanup_errors=True) as place,
            ):
                finished = run_contained(
                    [sys.executable, str(PROGRAMS / "in_memory.py"), str(workers), str(MEGABYTES), place],
                    out=Path(out),
                    environment={**environment_of_runs(workers), "BENCHMARK_OUT": out},
                    timeout_s=timeout_s,
                )
                found = finished.value("in_memory")
            for title, row in rows.items():
                row.values.append(found[title])
        except RunFailedError as error:
            for row in rows.values():
                row.values.append(None)
                row.failures.append(str(error))
    for title in (MEMCPY, *BLOCKED.values()):
        rows[title].remarks.append(f"{MEGABYTES} MB on each rank, in every step")
    return list(rows.values())


def in_memory_bounds(rows: list[Row]) -> list[str]:
    """Return a line about the limit for the time for which report() blocks."""
    found = {row.measure: row for row in rows}
    if MEMCPY not in found or (ratio := found[BLOCKED["MEMORY"]].ratio_to(found[MEMCPY])) is None:
        return []
    return [f"{DISTRAIN}, {BLOCKED['MEMORY']}: {ratio:.2f} x ({MEMCPY}), {MOST_OF_MEMCPY:g} x at most wanted"]

"""Measure the CPU time of lines that workers print, and compare with programs that print the same lines into files."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contained import RunFailedError, run_contained
from benchmarks.launchers import DISTRAIN, PROGRAMS, environment_of_runs
from benchmarks.table import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OUTPUT = "output"
"""Name of the measure on the command line."""
OUTPUT_WORKERS = (8,)
OUTPUT_MEGABYTES = 20
BYTES_PER_LINE = 80
PLAIN, FLOOR = "python into a file", "python into a pipe and cat"
HIDDEN = f"{DISTRAIN}, ranks hidden"
WAYS = {PLAIN: "plain", FLOOR: "line-buffered", DISTRAIN: "shown", HIDDEN: "hidden"}
"""How ``programs/print_lines.py`` prints, by the name in the table."""
BOUNDS = ((DISTRAIN, PLAIN, 3.0), (HIDDEN, PLAIN, 1.5), (HIDDEN, FLOOR, 1.2))
"""Limits: the first should take at most this many times as much CPU time as the second."""


def measure_output(workers: int, runs: int, *, timeout_s: float, progress: Callable[[str], None]) -> list[Row]:
    """Print in each way in turn, ``runs`` times."""
    rows = {name: Row(measure="output, CPU", workers=workers, launcher=name, unit="s", values=[]) for name in WAYS}
    lines = OUTPUT_MEGABYTES * 1_000_000 // BYTES_PER_LINE
    for index in range(runs):
        for name, how in WAYS.items():
            progress(f"output of {workers} x {OUTPUT_MEGABYTES} MB, run {index + 1} of {runs}: {name}")
            try:
                value, remarks = _run_once(how, workers, lines, timeout_s)
            except RunFailedError as error:
                rows[name].values.append(None)
                rows[name].failures.append(str(error))
            else:
                rows[name].values.append(value)
                rows[name].remarks += remarks
    return list(rows.values())


def _run_once(how: str, workers: int, lines: int, timeout_s: float) -> tuple[float, list[str]]:
    """Return the CPU seconds of a run, and a remark about its parts."""
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        finished = run_contained(
            [sys.executable, str(PROGRAMS / "print_lines.py"), how, str(workers), str(lines)],
            out=Path(folder),
            environment={**environment_of_runs(0), "BENCHMARK_OUT": folder, "PYTHONUNBUFFERED": ""},
            timeout_s=timeout_s,
        )
        if finished.exit_code:
            raise RunFailedError(finished.how_it_ended())
        if how not in ("shown", "hidden"):
            return finished.cpu_s, finished.remarks()
        of_workers, of_user = sum(finished.of_ranks("worker", workers)), finished.value("user")
        others = finished.cpu_s - of_workers - of_user
        parts = f"workers {of_workers:.1f}, your process {of_user:.1f}, others {others:.1f}"
        return finished.cpu_s, [parts, *finished.remarks()]


def output_bounds(rows: Sequence[Row]) -> list[str]:
    """Return one line per limit in BOUNDS: the ratio that was measured, and the limit."""
    found = {row.launcher: row for row in rows if row.measure == "output, CPU"}
    return [
        f"{name}, output: {ratio:.2f} x ({reference}), {bound:g} x at most wanted"
        for name, reference, bound in BOUNDS
        if found and (ratio := found[name].ratio_to(found[reference])) is not None
    ]

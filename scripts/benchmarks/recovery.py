"""Measure the time from kill -9 of a rank to the next all_reduce, or, without restarts, to the error."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contained import RunFailedError, last_line, run_contained
from benchmarks.launchers import DISTRAIN, PROGRAMS, TORCHRUN, environment_of_runs
from benchmarks.table import Row

if TYPE_CHECKING:
    from collections.abc import Callable

RECOVERY = "recovery"
"""Name of the measure on the command line."""
RECOVERY_WORKERS = (2, 8)
TITLES = {True: "kill to next all_reduce", False: "kill to error"}
MAX_RESTARTS = 3
LONGEST_S = 40.0
"""Seconds after which a restart has failed: gloo then waits for ranks of the last attempt, which have ended."""
SETTLE_S = 0.3
LOOK_EVERY_S = 0.002


def measure_recovery(
    workers: int, runs: int, skip: list[str], *, timeout_s: float, progress: Callable[[str], None]
) -> list[Row]:
    """Kill a rank under each launcher in turn, ``runs`` times, with and without restarts."""
    rows: list[Row] = []
    for restarts, title in TITLES.items():
        launchers = [name for name in (DISTRAIN, TORCHRUN) if name not in skip]
        found = {n: Row(measure=title, workers=workers, launcher=n, unit="s", values=[]) for n in launchers}
        for index in range(runs):
            for name, row in found.items():
                progress(f"{title}, {workers} workers, run {index + 1} of {runs}: {name}")
                try:
                    value, remarks = _run_once(name, workers, restarts=restarts, timeout_s=min(timeout_s, LONGEST_S))
                    row.values.append(value)
                    row.remarks += remarks
                except RunFailedError as error:
                    row.values.append(None)
                    row.failures.append(str(error))
        rows += found.values()
    return rows


def _command(launcher: str, workers: int, max_restarts: int) -> list[str]:
    program = str(PROGRAMS / "recover.py")
    if launcher == DISTRAIN:
        return [sys.executable, program, str(workers), str(max_restarts)]
    options = ["--standalone", "--nproc-per-node", str(workers), "--max-restarts", str(max_restarts)]
    return [sys.executable, "-m", "torch.distributed.run", *options, program]


def _run_once(launcher: str, workers: int, *, restarts: bool, timeout_s: float) -> tuple[float, list[str]]:
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        killing = _Killing(Path(folder), workers, restarts=restarts)
        finished = run_contained(
            _command(launcher, workers, MAX_RESTARTS if restarts else 0),
            out=killing.out,
            environment={**environment_of_runs(workers), "BENCHMARK_OUT": folder},
            timeout_s=timeout_s,
            while_running=killing,
        )
        if not restarts and killing.killed_at:
            raised = finished.value("raised") if launcher == DISTRAIN else finished.ended
            return float(raised) - killing.killed_at, []
        if killing.recovered_at is None:
            raise RunFailedError(finished.how_it_ended())
        return killing.recovered_at - killing.killed_at, killing.remarks()


class _Killing:
    """Kill the last rank of a run when all ranks have trained for a while, then wait until all ranks train again.

    Times are time.time() of this machine; 0 or None if the run ended before.
    """

    def __init__(self, out: Path, workers: int, *, restarts: bool) -> None:
        self.out = out
        self.killed_at = 0.0
        self.recovered_at: float | None = None
        self._workers = workers
        self._restarts = restarts

    def __call__(self, is_over: Callable[[], bool]) -> None:
        while self._all_since(0.0) is None:
            if is_over():
                return
            time.sleep(LOOK_EVERY_S)
        time.sleep(SETTLE_S)
        victim = self._latest(self._workers - 1)["pid"]
        self.killed_at = time.time()
        os.kill(victim, signal.SIGKILL)
        if not self._restarts:
            return
        while self.recovered_at is None and not is_over():
            self.recovered_at = self._all_since(self.killed_at)
            time.sleep(LOOK_EVERY_S)
        (self.out / "recovered.json").write_text("true")

    def remarks(self) -> list[str]:
        """Return a remark about restarts without an all_reduce of all ranks, if there were any."""
        failed = self._latest(0)["restarts"] - 1
        return [f"after {failed} failed restart(s): {last_line(self.out / 'output')}"] if failed > 0 else []

    def _latest(self, rank: int) -> dict[str, int]:
        found: dict[str, int] = json.loads(max(self.out.glob(f"first_{rank}_*.json")).read_text())
        return found

    def _all_since(self, moment: float) -> float | None:
        """Return when the last rank made its first all_reduce after ``moment``, or None if one has not."""
        first: dict[str, float] = {}
        for path in self.out.glob("first_*.json"):
            _, rank, nanoseconds = path.stem.split("_")
            if (at := int(nanoseconds) / 1e9) > moment:
                first[rank] = at
        return max(first.values()) if len(first) == self._workers else None

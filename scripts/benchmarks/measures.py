"""The measures: a task for the workers, and the figures from a finished run."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.contained import LOOK_EVERY_S, Finished, Member, RunFailedError, look_at_memory, run_contained
from benchmarks.launchers import DISTRAIN, TORCHRUN, Launcher, environment_of_runs
from benchmarks.table import Figure, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Name on the command line -> task of the workers.
MEASURES = {"start": "start", "second": "second", "empty": "empty", "report": "report", "memory": "hold", "ddp": "ddp"}
# Task -> its first measure.
TITLES = {
    "start": "start",
    "second": "second fit()",
    "empty": "empty, start to end",
    "report": "report, median",
    "hold": "memory beside workers",
    "ddp": "DDP steps",
}
SETTLE_S = 1.0


@dataclass(slots=True, kw_only=True)
class Measured:
    """Results that are not in the rows. At the end they become facts."""

    losses: dict[str, list[Any]] = field(default_factory=dict)
    reports_kept: list[Mapping[str, int]] = field(default_factory=list)

    def facts(self, versions: Mapping[str, str]) -> list[str]:
        """Return one sentence per fact. versions: launcher -> version of its torch."""
        facts = [_compare_losses(name, self.losses, versions) for name in self.losses if name != TORCHRUN]
        if self.reports_kept:
            kept = sum(count["kept"] for count in self.reports_kept)
            made = sum(count["made"] for count in self.reports_kept)
            facts.append(f"distrain: {kept:,} of {made:,} reports are in metrics.jsonl")
        return facts


def _compare_losses(name: str, losses: Mapping[str, list[Any]], versions: Mapping[str, str]) -> str:
    """Compare every bit of the losses of all ranks, round by round. Failed runs are None."""
    pairs = zip(losses[name], losses.get(TORCHRUN, []), strict=False)
    compared = [ours == theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    if not compared:
        return f"DDP losses of {name} and {TORCHRUN}: not compared"
    verdict = "bit-equal" if all(compared) else "DIFFERENT" if not any(compared) else "NOT ALWAYS bit-equal"
    steps = next(len(ranks[0]) for ranks in losses[name] if ranks is not None)
    other = versions.get(name, "") != versions.get(TORCHRUN, "")
    torches = f" (torch {versions[name]} and {versions[TORCHRUN]})" if other else ""
    return (
        f"DDP losses of {name} and {TORCHRUN}: {verdict}, all ranks, {steps} steps, "
        f"{sum(compared)} of {len(compared)} pairs{torches}"
    )


def measure(
    task: str,
    workers: int,
    runs: int,
    launchers: Sequence[Launcher],
    measured: Measured,
    *,
    timeout_s: float,
    progress: Callable[[str], None],
) -> list[Row]:
    """Run each launcher in turn, ``runs`` times. Return rows in the order of the launchers, also for failures."""
    able = [launcher for launcher in launchers if task in launcher.tasks and workers >= launcher.min_workers]
    rows: dict[str, dict[tuple[str, str], Row]] = {launcher.name: {} for launcher in able}
    failures: dict[str, list[str]] = {launcher.name: [] for launcher in able}
    for index in range(runs):
        for launcher in able:
            progress(f"{task}, {workers} workers, run {index + 1} of {runs}: {launcher.name}")
            try:
                figures, remarks = _run_once(launcher, task, workers, measured, timeout_s)
            except RunFailedError as error:
                failures[launcher.name].append(str(error))
                figures, remarks = [], []
                if task == "ddp":
                    measured.losses.setdefault(launcher.name, []).append(None)
            _add(rows[launcher.name], launcher, workers, index, figures, remarks)
    for launcher in able:
        if not rows[launcher.name]:
            row = Row(measure=TITLES[task], workers=workers, launcher=launcher.name, unit="", values=[])
            rows[launcher.name][TITLES[task], ""] = row
        for row in rows[launcher.name].values():
            row.values += [None] * (runs - len(row.values))
            row.failures += failures[launcher.name]
    return [row for launcher in able for row in rows[launcher.name].values()]


def _add(
    rows: dict[tuple[str, str], Row],
    launcher: Launcher,
    workers: int,
    index: int,
    figures: Sequence[Figure],
    remarks: Sequence[str],
) -> None:
    """Add the figures of round ``index``. Earlier rounds without a figure get None."""
    for figure in figures:
        key = (figure.measure, figure.variant)
        name = ", ".join(filter(None, [launcher.name, figure.variant]))
        fresh = Row(measure=figure.measure, workers=workers, launcher=name, unit=figure.unit, values=[])
        fresh.remarks += filter(None, [launcher.remark, figure.remark])  # of the first run; later ones are similar
        row = rows.setdefault(key, fresh)
        row.values += [None] * (index - len(row.values)) + [figure.value]
        row.remarks += remarks


def _run_once(
    launcher: Launcher, task: str, workers: int, measured: Measured, timeout_s: float
) -> tuple[list[Figure], list[str]]:
    # A short path, because Ray puts sockets there: their paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        out = Path(folder)
        environment = {**environment_of_runs(workers), **launcher.environment}
        environment |= {"BENCHMARK_OUT": folder, "RAY_TMPDIR": folder}
        if task == "ddp":
            environment["OMP_NUM_THREADS"] = "1"  # because the defaults of the launchers differ
        members: list[Member] = []
        finished = run_contained(
            launcher.command(task, workers),
            out=out,
            environment=environment,
            timeout_s=timeout_s,
            while_running=(lambda over: _look_when_held(out, workers, over, members)) if task == "hold" else None,
        )
        figures = _read(task, finished, workers, members)
        if task == "ddp":
            losses = [rank["losses"] for rank in finished.of_ranks("ddp", workers)]
            measured.losses.setdefault(launcher.name, []).append(losses)
        if task == "report" and launcher.name == DISTRAIN:
            measured.reports_kept.append(finished.value("kept"))
        return figures, finished.remarks()


def _look_when_held(out: Path, workers: int, over: Callable[[], bool], members: list[Member]) -> None:
    pids = [out / f"pid_{rank}.json" for rank in range(workers)]
    while not all(path.exists() for path in pids):
        if over():
            return
        time.sleep(LOOK_EVERY_S)
    time.sleep(SETTLE_S)
    members += look_at_memory()
    (out / "looked.json").write_text("true")


def _read(task: str, finished: Finished, workers: int, members: Sequence[Member]) -> list[Figure]:
    title = TITLES[task]
    if task == "start":
        return _read_start(finished, workers, title)
    if task == "second":
        begun, reduced = finished.value("second_begun"), finished.of_ranks("reduced", workers)
        if min(reduced) < begun:
            raise RunFailedError("a rank did not take part in the second run")
        return [Figure(measure=title, value=max(reduced) - begun, unit="s")]
    if task == "empty":
        if finished.exit_code:
            raise RunFailedError(finished.how_it_ended())
        return [Figure(measure=title, value=finished.ended - finished.begun, unit="s")]
    if task == "report":
        costs = sorted(finished.of_ranks("reports", workers)[0])
        remark = f"{len(costs):,} reports per run"
        high = Figure(measure="report, 99th percentile", value=1e6 * costs[int(0.99 * len(costs))], unit="us")
        return [Figure(measure=title, value=1e6 * median(costs), unit="us", remark=remark), high]
    if task == "hold":
        return _read_memory(finished, workers, members)
    return [Figure(measure=title, value=finished.of_ranks("ddp", workers)[0]["steps_per_s"], unit="/s")]


def _read_start(finished: Finished, workers: int, title: str) -> list[Figure]:
    reduced = max(finished.of_ranks("reduced", workers))
    cpu = Figure(measure=f"{title}, CPU to the exit", value=finished.cpu_s, unit="s")
    figures = [Figure(measure=title, value=reduced - finished.begun, unit="s"), cpu]
    if (finished.out / "ray_ready.json").exists():
        ready = finished.value("ray_ready")
        figures.append(Figure(measure=title, value=reduced - ready, unit="s", variant="after init"))
    return figures


def _read_memory(finished: Finished, workers: int, members: Sequence[Member]) -> list[Figure]:
    ranks = set(finished.of_ranks("pid", workers))
    beside = sorted((member.pss_mb for member in members if member.pid not in ranks), reverse=True)
    largest = " + ".join(f"{pss:.0f}" for pss in beside[:4]) + (" + ..." if len(beside) > 4 else "")
    remark = f"{len(beside)} processes: {largest}"
    total = sum(member.pss_mb for member in members)
    return [
        Figure(measure=TITLES["hold"], value=sum(beside), unit="MB", remark=remark),
        Figure(measure="memory in all", value=total, unit="MB"),
    ]


def measure_imports(pythons: Mapping[str, str], runs: int, *, timeout_s: float) -> list[Row]:
    """Measure ``import torch`` for each interpreter. pythons: label -> path."""
    rows = [
        Row(measure="python -c 'import torch'", workers=0, launcher=label, unit="s", values=[]) for label in pythons
    ]
    for _ in range(runs):
        for row, python in zip(rows, pythons.values(), strict=True):
            with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as folder:
                try:
                    finished = run_contained(
                        [python, "-c", "import torch"],
                        out=Path(folder),
                        environment=environment_of_runs(0),
                        timeout_s=timeout_s,
                    )
                    row.values.append(finished.ended - finished.begun)
                except RunFailedError as error:
                    row.values.append(None)
                    row.failures.append(str(error))
    return rows


def say_progress(text: str) -> None:
    """Show one line, which the next one overwrites. Show nothing if stderr is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

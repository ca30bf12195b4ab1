"""Measure how long checkpoints block the training loop, and compare with ``cp`` and fsync on the same disk."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.contained import RunFailedError, run_contained
from benchmarks.launchers import DISTRAIN, Launcher, environment_of_runs
from benchmarks.table import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHECKPOINT = "checkpoint"
"""Name of the measure on the command line, and of the workers' task."""
CHECKPOINT_WORKERS = (1,)
CHECKPOINTS_ON_DISK = 6
"""Most checkpoints of one run that are on the disk together: four committed ones and two files of the last way."""
MANY_FILES_MB = 64
"""Megabytes of the checkpoint of 1,000 files."""
TITLES = (
    "checkpoint, SYNC",
    "checkpoint, SYNC, 1,000 files",
    "checkpoint, SYNC, delete",
    "checkpoint, ASYNC",
    "checkpoint, ASYNC, delete",
    "committed, ASYNC",
    "committed, ASYNC, delete",
    "cp",
    "cp, fsync of the copy",
    "cp -r, fsync of the copies",
    "fsync, crc32",
)
MANY_FILES = ("checkpoint, SYNC, 1,000 files", "cp -r, fsync of the copies")
"""Those of the titles that are about 1,000 files. The others are about one."""
BOUNDS = (
    ("checkpoint, SYNC", "cp, fsync of the copy", 1.05),
    (*MANY_FILES, 1.05),
    ("checkpoint, SYNC, delete", "cp, fsync of the copy", 1.2),
    ("checkpoint, ASYNC", "cp", 1.0),
    ("checkpoint, ASYNC, delete", "checkpoint, SYNC", 0.1),
)
"""Limits for distrain: the first measure should take at most this many times as long as the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The absolute path of the directory for sources and run directories, and the size of a checkpoint."""

    folder: Path
    megabytes: int

    @property
    def file_system(self) -> str:
        """The type of the file system, or "" if it is unknown."""
        mounts = [part for part in psutil.disk_partitions(all=True) if self.folder.is_relative_to(part.mountpoint)]
        return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""

    def complaint(self) -> str | None:
        """Return why nothing can be measured in the directory, or None."""
        if not self.folder.is_dir():
            return f"{self.folder}: there is no such directory"
        needed = CHECKPOINTS_ON_DISK * (self.megabytes + MANY_FILES_MB)
        free = psutil.disk_usage(str(self.folder)).free // 1_000_000
        if needed > free:
            return f"{self.folder}: {needed:,} MB are needed, {free:,} MB are free; there is --checkpoint-mb"
        return None


def measure_checkpoints(
    launchers: Sequence[Launcher], runs: int, disk: Disk, *, timeout_s: float, progress: Callable[[str], None]
) -> list[Row]:
    """Run each launcher in turn, ``runs`` times. A run reports and copies once in each way."""
    able = [launcher for launcher in launchers if CHECKPOINT in launcher.tasks]
    rows = {name: [_row(title, name, disk) for title in TITLES] for name in (launcher.name for launcher in able)}
    for index in range(runs):
        for launcher in able:
            progress(f"checkpoint of {disk.megabytes:,} MB, run {index + 1} of {runs}: {launcher.name}")
            took, remarks, failures = _run_once(launcher, index, disk, timeout_s)
            for row in rows[launcher.name]:
                row.values.append(1000 * took[row.measure] if took else None)
                row.remarks += remarks
                row.failures += failures
    return [row for launcher in able for row in rows[launcher.name]]


def _row(title: str, launcher: str, disk: Disk) -> Row:
    megabytes = MANY_FILES_MB if title in MANY_FILES else disk.megabytes
    remark = f"{megabytes:,} MB on {disk.file_system}"
    return Row(measure=title, workers=1, launcher=launcher, unit="ms", values=[], remarks=[remark])


def _run_once(
    launcher: Launcher, index: int, disk: Disk, timeout_s: float
) -> tuple[dict[str, float], list[str], list[str]]:
    """Return the seconds by title, the remarks, and the failures."""
    with (
        tempfile.TemporaryDirectory(prefix="b-", dir="/tmp", ignore_cleanup_errors=True) as out,
        tempfile.TemporaryDirectory(prefix="benchmark-", dir=disk.folder, ignore_cleanup_errors=True) as place,
    ):
        environment = {**environment_of_runs(0), **launcher.environment, "BENCHMARK_OUT": out, "RAY_TMPDIR": out}
        environment |= {"BENCHMARK_DISK": place, "BENCHMARK_CHECKPOINT_MB": str(disk.megabytes)}
        try:
            finished = run_contained(
                launcher.command(CHECKPOINT, *CHECKPOINT_WORKERS),
                out=Path(out),
                environment={**environment, "BENCHMARK_ROUND": str(index)},
                timeout_s=timeout_s,
            )
            return finished.value(CHECKPOINT), finished.remarks(), []
        except RunFailedError as error:
            return {}, [], [str(error)]


def checkpoint_bounds(rows: Sequence[Row]) -> list[str]:
    """Return one line per limit in BOUNDS: the ratio that was measured, and the limit."""
    found = {row.measure: row for row in rows if row.launcher == DISTRAIN}
    return [
        f"{DISTRAIN}, {title}: {ratio:.2f} x ({reference}), {bound:g} x at most wanted"
        for title, reference, bound in BOUNDS
        if title in found and (ratio := found[title].ratio_to(found[reference])) is not None
    ]

"""The task of ``checkpoint`` for its one worker: report a checkpoint in every way, and copy one without a launcher.

``train`` is distrain or ray.train, whose names are the same. Runs in: worker.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark_tasks import write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MANY = "1,000 files"
"""The end of the names of ways that store so many files. The others store one."""
MANY_COUNT = 1000
MANY_MB = 64
REPORTS = {"SYNC": False, f"SYNC, {MANY}": False, "SYNC, delete": True, "ASYNC": False, "ASYNC, delete": True}
"""Way to report -> True if it deletes the files of the worker. The first word is the upload mode."""
BLOCK_BYTES = 4 << 20
LOOK_EVERY_S = 0.002


def measure_checkpoints(train: Any, path_of_committed: Callable[[], str | None]) -> None:
    """Measure each way once, in an order that depends on the round.

    As usual with checkpoints, the files were written just before. Nothing of earlier ways waits to be written then.
    What the first report sets up is not counted.
    """
    disk = Path(os.environ["BENCHMARK_DISK"])
    megabytes = int(os.environ["BENCHMARK_CHECKPOINT_MB"])
    reporting = _Reporting(train, path_of_committed)
    ways: dict[str, Callable[[Path], dict[str, float]]] = {"copy": _copy, f"copy, {MANY}": _copy_many, "hash": _hash}
    for name in REPORTS:
        ways[name] = lambda source, name=name: reporting.report(name, source)  # type: ignore[misc]
        with _written(disk, 1) as source:
            reporting.report(name, source)
    took: dict[str, float] = {}
    for name in _in_order(list(ways), int(os.environ["BENCHMARK_ROUND"])):
        many = name.endswith(MANY)
        with _written(disk, MANY_MB if many else megabytes, files=MANY_COUNT if many else 1) as source:
            took |= ways[name](source)
    write("checkpoint", took)


def _in_order(names: list[str], index: int) -> list[str]:
    """Return the names in an order in which each has other neighbours and another position than in the last round."""
    turned = index % len(names)
    names = names[turned:] + names[:turned]
    return names[::-1] if index % 2 else names


@contextmanager
def _written(disk: Path, megabytes: int, *, files: int = 1) -> Iterator[Path]:
    """Yield a directory with new files that are only in the page cache. Everything else is on the disk."""
    os.sync()
    source = disk / "source"
    source.mkdir()
    # Take the memory first: if a virtual machine has to get it from its host, a copy is up to ten times slower.
    _write(source / "warm_up", 2_000_000 * megabytes)
    (source / "warm_up").unlink()
    for number in range(files):
        _write(source / f"model_{number}.pt", 1_000_000 * megabytes // files)
    yield source
    shutil.rmtree(source, ignore_errors=True)


def _write(path: Path, size: int) -> None:
    block = os.urandom(min(size, 1_000_000))
    with open(path, "wb") as file:
        for _ in range(size // len(block)):
            file.write(block)


class _Reporting:
    """Reports checkpoints. path_of_committed: returns the path of the latest committed one, None before the first."""

    def __init__(self, train: Any, path_of_committed: Callable[[], str | None]) -> None:
        self._train = train
        self._path_of_committed = path_of_committed

    def report(self, name: str, source: Path) -> dict[str, float]:
        """Report, and return the seconds of the call, and those until the checkpoint was committed."""
        before = self._path_of_committed()
        sizes = _sizes(source)
        begun = time.perf_counter()
        self._train.report(
            {},
            checkpoint=self._train.Checkpoint.from_directory(source),
            checkpoint_upload_mode=self._train.CheckpointUploadMode[name.split(",")[0]],
            delete_local_checkpoint_after_upload=REPORTS[name],
        )
        blocked = time.perf_counter() - begun
        while (path := self._path_of_committed()) == before:
            time.sleep(LOOK_EVERY_S)
        committed = time.perf_counter() - begun
        assert path is not None
        if not sizes.items() <= (stored := _sizes(Path(path))).items():
            raise RuntimeError(f"{name}: {stored} instead of {sizes} in {path}")
        return {f"checkpoint, {name}": blocked, f"committed, {name}": committed}


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("*.pt")}


def _copy(source: Path) -> dict[str, float]:
    """Run ``cp``, then fsync the copy. Return the seconds of both."""
    copied, flushed = _copy_and_flush(source)
    return {"cp": copied, "cp, fsync of the copy": flushed}


def _copy_many(source: Path) -> dict[str, float]:
    """Run ``cp -r``, then fsync each copy. Return the seconds."""
    return {"cp -r, fsync of the copies": _copy_and_flush(source)[1]}


def _copy_and_flush(source: Path) -> tuple[float, float]:
    """Return the seconds until a directory was copied, and until the copies were flushed."""
    target = source.with_name("copy")
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    copied = time.perf_counter() - begun
    for copy in target.iterdir():
        _flush(copy)
    flushed = time.perf_counter() - begun
    shutil.rmtree(target)
    return copied, flushed


def _hash(source: Path) -> dict[str, float]:
    """Do what any checkpoint needs: fsync the file and compute a checksum. Return the seconds."""
    [file] = source.iterdir()
    begun = time.perf_counter()
    _flush(file)
    crc = 0
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with open(file, "rb", buffering=0) as reader:
        while count := reader.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return {"fsync, crc32": time.perf_counter() - begun}


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())

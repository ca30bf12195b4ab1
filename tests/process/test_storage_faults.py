"""Real faults of the storage. After each one no half checkpoint is offered, nothing committed is lost, and the message
names what happened, where, and how to continue.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import Checkpoint, ControllerError, StorageError, TrainingFailedError
from tests.process.conftest import Fit, assert_no_half_checkpoint, records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE_BYTES = 4096
EPOCHS = 5
NO_SPACE = "No space left on device"


def train(config: dict[str, Any]) -> str:
    """Each rank brings one file per epoch. The fault strikes when two epochs are committed; says where it began."""
    rank = distrain.get_context().get_world_rank()
    checkpoint = distrain.get_checkpoint()
    begin = 0 if checkpoint is None else int(Path(checkpoint.path, f"shard-{rank}").read_text()) + 1
    for epoch in range(begin, begin + EPOCHS):
        distrain.collective.barrier()
        if epoch == 2 and rank == 0 and config["strike"]:
            distrain.get_all_reported_checkpoints()  # returns when two epochs are committed
            config["strike"]()
        distrain.collective.barrier()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"shard-{rank}").write_text(str(epoch))
            distrain.report({"epoch": epoch}, checkpoint=Checkpoint.from_directory(folder))
    return f"began at {begin}"


def committed(run: Path) -> dict[str, bytes]:
    """Every byte that is committed, by path. All checkpoints are complete, and each is the one after the one before."""
    assert_no_half_checkpoint(run.parent)
    for folder in run.glob("checkpoint_*"):
        assert {path.name: path.read_text() for path in folder.glob("shard-*")} == {
            f"shard-{rank}": str(int(folder.name[-6:])) for rank in range(2)
        }
    files = [path for path in run.glob("checkpoint_*/**/*") if path.is_file()]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def newest(run: Path) -> int:
    return max(int(path.name[-6:]) for path in run.glob("checkpoint_*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB. Skips where nothing can be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting needs root: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path, *, pages_left: int = 0) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PAGE_BYTES))
        except OSError:
            file.truncate(file.tell() - pages_left * PAGE_BYTES)


def fails(fit: Fit, strike: Callable[[], object] | None = None) -> TrainingFailedError | StorageError:
    with pytest.raises((TrainingFailedError, StorageError)) as raised:
        fit(train, {"strike": strike}, name="run")
    return raised.value


def assert_goes_on(fit: Fit) -> None:
    """The fault is mended: the run continues after its newest checkpoint, and nothing is lost."""
    run = fit.storage / "run"
    before, goes_on_at = committed(run), newest(run) + 1
    assert goes_on_at >= 2
    assert fit(train, {"strike": None}, name="run").return_value == f"began at {goes_on_at}"
    assert committed(run).items() >= before.items()
    assert newest(run) == goes_on_at + EPOCHS - 1
    assert not (run / ".staging").exists()
    found = [(line["attempt"], line["rank"], line["index"]) for line in records(run)]
    assert len(found) == len(set(found))


def test_a_disk_that_is_full_in_the_middle(small_disk: Path) -> None:
    fit = Fit(storage=small_disk / "runs")
    run = fit.storage / "run"
    error = fails(fit, partial(fill, small_disk))
    assert isinstance(error, ControllerError)
    for text in (NO_SPACE, "free some space there", str(run), "checkpoint: checkpoint_000001, at report 2\n"):
        assert text in str(error)
    assert "once that is fixed, start the run again with RunConfig(name='run')" in str(error)
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert json.loads((run / "error.json").read_text())["type"] == "ControllerError"
    assert list(run.glob("*.new")) == []
    assert max(line["metrics"]["epoch"] for line in records(run)) > newest(run), "the last reports, too"
    before = committed(run)
    assert error.result.checkpoint.path == str(run / f"checkpoint_{newest(run):06d}")
    assert NO_SPACE in str(fails(fit)), "it is full still"
    assert committed(run) == before
    (small_disk / "ballast").unlink()
    assert_goes_on(fit)


def test_a_run_directory_that_is_moved_away_in_the_middle(fit: Fit, tmp_path: Path) -> None:
    run, moved = fit.storage / "run", tmp_path / "moved"
    error = fails(fit, lambda: run.rename(moved))
    assert "No such file or directory" in str(error)
    assert str(run) in str(error)
    shutil.rmtree(run, ignore_errors=True)  # stacks and logs of the end
    moved.rename(run)
    assert_goes_on(fit)


def test_reports_that_fill_the_disk_leave_space_for_how_the_run_ended(small_disk: Path) -> None:
    """More reports wait for space than the run has reserved."""

    def report_much() -> None:
        for step in range(500):
            distrain.report({"step": step, "pad": "x" * 1000})

    run = small_disk / "runs" / "run"
    for kind in (ControllerError, StorageError):  # the second run does not get its reserve, and leaves nothing of it
        with pytest.raises(kind, match=r"No space left on device; free some space there"):
            Fit(storage=run.parent)(report_much, workers=1, name="run")
        assert not (run / ".reserve").exists()
        assert json.loads((run / "run.json").read_text())["status"] == "failed"
        assert "cannot write metrics" in json.loads((run / "error.json").read_text())["message"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_is_not_finished_if_its_last_checkpoint_cannot_be_committed(small_disk: Path, workers: int) -> None:
    """train_func has returned then, as its files were taken from it."""
    run = small_disk / "runs" / "run"

    def leave_no_room_for_the_manifest() -> str:
        checkpoint = distrain.get_checkpoint()
        for number in range(2 if checkpoint is None else 1):
            distrain.collective.barrier()
            if number == 1 and distrain.get_context().get_world_rank() == 0:
                files = [run / "metrics.jsonl", run / "events.jsonl"]
                while not all(file.exists() and file.stat().st_size for file in files):  # each first line needs a page
                    time.sleep(0.01)
                fill(small_disk, pages_left=max(workers, 1))
            distrain.collective.barrier()
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, f"shard-{distrain.get_context().get_world_rank()}").write_bytes(bytes(PAGE_BYTES))
                distrain.report({"number": number}, checkpoint=Checkpoint.from_directory(folder))
        return "done" if checkpoint is None else "again"

    fit = partial(Fit(storage=run.parent), leave_no_room_for_the_manifest, workers=workers, name="run")
    with pytest.raises(
        ControllerError, match=r"cannot (write|store) a checkpoint\b.*No space left on device"
    ) as raised:
        fit()
    assert "checkpoint: checkpoint_000000, " in str(raised.value)
    assert json.loads((run / "run.json").read_text())["status"] != "finished"
    (small_disk / "ballast").unlink()
    assert fit().return_value == "again"
    assert newest(run) == 1

"""Checkpoints: which ranks' files are joined, when they are safe, what is kept, and where the next run begins."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import distrain
from distrain import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    FailureConfig,
    Result,
    StorageError,
    WorkerGroupError,
)
from tests.process.conftest import Fit, files_of, reported


def save(name: str, text: str, metrics: dict[str, Any] | None = None) -> None:
    """Report one file as a checkpoint, from a temporary directory that is gone right afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, name).write_text(text)
        distrain.report(metrics or {}, checkpoint=Checkpoint.from_directory(folder))


def names(run: str) -> list[str]:
    return sorted(path.name for path in Path(run).glob("checkpoint_*"))


# -- which ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(30)  # far below missing_rank_s
@pytest.mark.parametrize(
    "config", [CheckpointConfig(missing_rank_s=1.0), CheckpointConfig(checkpoint_ranks=[0])], ids=["in time", "at once"]
)
def test_rank_0_alone_is_safe_before_the_silent_ranks_have_finished(
    fit: Fit, tmp_path: Path, config: CheckpointConfig
) -> None:
    def train() -> None:
        if distrain.get_context().get_world_rank() == 0:
            save("model.txt", "first")
            save("model.txt", "second")
            while distrain.get_checkpoint() is None:
                time.sleep(0.001)
            (place / "committed").touch()
        while not (place / "committed").exists():
            time.sleep(0.001)

    place = tmp_path
    assert files_of(fit(train, workers=3, checkpoint_config=config).checkpoint) == {"model.txt": "second"}


# -- when a checkpoint is safe ---------------------------------------------------------------------------------------


def test_no_restart_begins_with_a_checkpoint_that_lacks_the_files_of_a_slow_rank(
    any_fit: Fit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> str:
        context, checkpoint = distrain.get_context(), distrain.get_checkpoint()
        rank = context.get_world_rank()
        if context.attempt == 0:
            while rank == 1 and len(names(context.get_trial_dir())) < 2:
                time.sleep(0.001)
        else:
            distrain.collective.barrier()
        for step in range(2):
            save(f"shard-{rank}", f"{step}")
        distrain.collective.barrier()
        return "scratch" if checkpoint is None else checkpoint.path

    (other := tmp_path / "pretrained").mkdir()
    result = any_fit(
        train,
        name="mine",
        resume_from=Checkpoint(other),
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(missing_rank_s=0.5),
    )
    assert result.return_value == str(other)
    assert [sorted(files_of(checkpoint)) for checkpoint, _ in result.best_checkpoints] == [["shard-0", "shard-1"]] * 2
    said = " ".join(capfd.readouterr().err.split())
    assert re.search(r"checkpoint_000000\S* (checkpoint_\d+ )?won't be used for restarts", said)
    assert f"restart 1 of 1, from {other}" in said
    with pytest.warns(
        UserWarning, match="skipped a checkpoint: .*: it lacks the files of rank 1, which had not reported"
    ):
        kept = Result.from_path(result.path).best_checkpoints
    assert [sorted(files_of(checkpoint)) for checkpoint, _ in kept] == [["shard-0", "shard-1"]] * 2


# -- where the next one begins ---------------------------------------------------------------------------------------


def train_three_epochs(config: dict[str, Any]) -> str:
    """Says where it began, unless it is to fail after the first epoch."""
    begin = 0
    if checkpoint := distrain.get_checkpoint():
        with checkpoint.as_directory() as folder:
            begin = int(Path(folder, "epoch.txt").read_text()) + 1
    for epoch in range(begin, 3):
        if distrain.get_context().get_world_rank() == 0:
            save("epoch.txt", str(epoch), {"epoch": epoch})
        else:
            distrain.report({"epoch": epoch})
        distrain.collective.barrier()
        if config.get("fails"):
            raise ValueError("not finished")
    return f"began at {begin}"


def test_an_unfinished_run_of_the_same_name_goes_on_and_a_finished_one_is_never_overwritten(
    any_fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerGroupError):
        any_fit(train_three_epochs, {"fails": True}, name="mine")
    result = any_fit(train_three_epochs, name="mine")
    assert result.path == str(any_fit.storage / "mine")
    assert result.return_value == "began at 1"
    assert result.error is None
    assert Result.from_path(result.path).error is None
    assert [metrics["epoch"] for metrics in reported(result.path, rank=0)] == [0, 1, 2]
    assert len(names(result.path)) == 3
    assert "continuing the unfinished run" in capsys.readouterr().err
    assert [Path(any_fit(train_three_epochs, name="mine").path).name for _ in range(2)] == ["mine-2", "mine-3"]
    assert "distrain: run 'mine' is finished, so this one is called mine-3\n" in capsys.readouterr().err
    assert len(reported(result.path, rank=0)) == 3


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("damaged", "goes_on_at"), [([1], "checkpoint_000000"), ([0, 1], "nowhere")])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    fit: Fit, capsys: pytest.CaptureFixture[str], damaged: list[int], goes_on_at: str
) -> None:
    def train(config: dict[str, Any]) -> str:
        checkpoint = distrain.get_checkpoint()
        for epoch in range(2):
            if distrain.get_context().get_world_rank() == 0:
                save("epoch.txt", f"{epoch}", {"epoch": epoch})
        distrain.collective.barrier()
        if config["fails"]:
            raise ValueError("not finished")
        return "nowhere" if checkpoint is None else Path(checkpoint.path).name

    only_rank_0 = CheckpointConfig(checkpoint_ranks=[0])
    with pytest.raises(WorkerGroupError):
        fit(train, {"fails": True}, name="mine", checkpoint_config=only_rank_0)
    run = fit.storage / "mine"
    for index in damaged:
        flip_a_bit(run / f"checkpoint_{index:06d}" / "epoch.txt")
    result = fit(train, {"fails": False}, name="mine", checkpoint_config=only_rank_0)
    assert result.return_value == goes_on_at
    said = capsys.readouterr().err
    assert "continuing the unfinished run" in said
    for index in damaged:
        assert f"checkpoint_{index:06d} is damaged: epoch.txt has changed since it was committed" in said
        assert (run / f"damaged-checkpoint_{index:06d}" / "epoch.txt").exists()


def test_a_damaged_checkpoint_to_resume_from_is_refused_before_anything_starts(fit: Fit) -> None:
    first = fit(train_three_epochs, name="first")
    assert first.checkpoint is not None
    assert fit(train_three_epochs, name="second", resume_from=first.checkpoint).return_value == "began at 3"
    flip_a_bit(Path(first.checkpoint.path, "epoch.txt"))
    with pytest.raises(CheckpointError, match=r"checkpoint_000002 is damaged: epoch.txt has changed"):
        fit(train_three_epochs, name="third", resume_from=first.checkpoint)
    assert not list((fit.storage / "third").glob("logs/*"))


@pytest.mark.parametrize("kind", ["a directory", "a dict"])
def test_a_new_run_starts_from(any_fit: Fit, tmp_path: Path, kind: str) -> None:
    def train() -> tuple[Any, ...]:
        checkpoint = distrain.get_checkpoint()
        assert checkpoint is not None
        distrain.report({}, checkpoint=Checkpoint.from_dict({"epoch": 4, "model": {"w": [1]}}))
        with checkpoint.as_directory() as folder:
            return Path(folder, "epoch").exists() and Path(folder, "epoch").read_text(), checkpoint.to_dict()

    given = {"epoch": 3, "weights": [1.0, 2.0]}
    start = Checkpoint.from_dict(given)
    if kind == "a directory":
        start.to_directory(tmp_path / "somewhere")
        (tmp_path / "somewhere" / "epoch").write_text("3")
        start = Checkpoint.from_directory(tmp_path / "somewhere")
    result = any_fit(train, resume_from=start)
    assert result.return_value == ("3" if kind == "a directory" else False, given)
    assert result.checkpoint is not None
    data = result.checkpoint.to_dict()
    assert (data["epoch"], data["model"]) == (4, {"w": [1]})


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_rank_asks_for_a_checkpoint_that_somebody_has_deleted(fit: Fit) -> None:
    def train() -> tuple[bool, str]:
        distrain.report({}, checkpoint=Checkpoint.from_dict({"x": 1}))
        checkpoint = distrain.get_checkpoint()
        shutil.rmtree(checkpoint.path, ignore_errors=True)  # both ranks do
        try:
            checkpoint.to_dict()
        except distrain.CheckpointError as error:
            return checkpoint.exists(), str(error)

    exists, error = fit(train).return_value
    assert not exists
    assert "does not exist (was it deleted by num_to_keep?)" in error


def test_a_storage_that_cannot_be_written_is_an_error_before_anything_starts(fit: Fit, tmp_path: Path) -> None:
    def train() -> None:
        (place / "started").touch()

    place = tmp_path
    (tmp_path / "file").touch()
    for storage in (Path("/proc/runs"), tmp_path / "file" / "runs"):
        with pytest.raises(StorageError, match="cannot use the run directory"):
            fit(train, storage_path=storage)
    assert not (place / "started").exists()


def test_a_checkpoint_to_resume_from_that_is_not_there_is_an_error_at_once(fit: Fit, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        fit(lambda: None, resume_from=Checkpoint(tmp_path / "missing"))
    (file := tmp_path / "run.json").touch()
    with pytest.raises(CheckpointError, match=f"{file} is a file, but a checkpoint is a directory"):
        fit(lambda: None, resume_from=Checkpoint(file))
    with pytest.raises(CheckpointError, match=f"{tmp_path} is a run; name a checkpoint in it"):
        fit(lambda: None, resume_from=Checkpoint(tmp_path))

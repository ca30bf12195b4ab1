"""Checkpoints: which ranks' files are joined, when they are safe, what is kept, and where the next run begins."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    CheckpointUploadMode,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    StorageError,
    TrainingFailedError,
    WorkerGroupError,
)
from distrain.storage import file_transfer
from tests.conftest import wait_until
from tests.process.conftest import Fit, assert_no_half_checkpoint, files_of, log_of, reported

if TYPE_CHECKING:
    import subprocess

Script = Callable[..., "subprocess.CompletedProcess[str]"]


def save(name: str, text: str, metrics: dict[str, Any] | None = None) -> None:
    """Report one file as a checkpoint, from a temporary directory that is gone right afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, name).write_text(text)
        distrain.report(metrics or {}, checkpoint=Checkpoint.from_directory(folder))


def meet(step: int) -> None:
    """Wait until every rank has come to this step, as the collectives of a real training do."""
    context = distrain.get_context()
    place = Path(context.storage_path, "barrier", f"{context.run_name}-{context.attempt}-{step}")
    place.mkdir(parents=True, exist_ok=True)
    (place / str(context.get_world_rank())).touch()
    while len(list(place.iterdir())) < context.get_world_size():
        time.sleep(0.001)


def names(run: str) -> list[str]:
    return sorted(path.name for path in Path(run).glob("checkpoint_*"))


# -- which ranks -----------------------------------------------------------------------------------------------------


def test_rank_0_alone_while_the_others_are_silent(any_fit: Fit) -> None:
    def train() -> None:
        if distrain.get_context().get_world_rank() == 0:
            for epoch in range(3):
                save("model.txt", f"epoch {epoch}", {"epoch": epoch})

    result = any_fit(train, workers=3)
    assert names(result.path) == ["checkpoint_000000", "checkpoint_000001", "checkpoint_000002"]
    assert files_of(result.checkpoint) == {"model.txt": "epoch 2"}
    assert [(files_of(c), m) for c, m in result.best_checkpoints] == [
        ({"model.txt": f"epoch {epoch}"}, {"epoch": epoch}) for epoch in range(3)
    ]


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


def test_a_rank_that_is_slow_at_the_beginning_is_waited_for(any_fit: Fit) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        time.sleep(0.4 * rank)
        for epoch in range(3):
            save(f"shard-{rank}.txt", f"rank {rank}, epoch {epoch}")

    result = any_fit(train)
    assert len(names(result.path)) == 3
    assert files_of(result.checkpoint) == {"shard-0.txt": "rank 0, epoch 2", "shard-1.txt": "rank 1, epoch 2"}


def test_rank_0_alone_while_the_others_report_metrics_only(any_fit: Fit) -> None:
    def train() -> None:
        for epoch in range(3):
            if distrain.get_context().get_world_rank() == 0:
                save("model.txt", f"epoch {epoch}", {"epoch": epoch})
            else:
                distrain.report({"epoch": epoch})

    result = any_fit(train, workers=3)
    assert len(names(result.path)) == 3
    assert files_of(result.checkpoint) == {"model.txt": "epoch 2"}


def test_some_ranks_bring_files(any_fit: Fit) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        for epoch in range(2):
            meet(epoch)
            if rank in (1, 3):
                save(f"shard-{rank}.txt", f"rank {rank}, epoch {epoch}", {"epoch": epoch})
            else:
                distrain.report({"epoch": epoch})

    result = any_fit(train, workers=4)
    assert len(names(result.path)) == 2
    assert files_of(result.checkpoint) == {"shard-1.txt": "rank 1, epoch 1", "shard-3.txt": "rank 3, epoch 1"}


def test_all_ranks_bring_files_of_their_own(any_fit: Fit) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        for epoch in range(2):
            meet(epoch)
            time.sleep(0.02 * rank)
            save(f"shard-{rank}.txt", f"rank {rank}, epoch {epoch}", {"epoch": epoch, "rank": rank})

    result = any_fit(train, workers=3)
    assert len(names(result.path)) == 2
    assert files_of(result.checkpoint) == {f"shard-{rank}.txt": f"rank {rank}, epoch 1" for rank in range(3)}
    assert [metrics for _, metrics in result.best_checkpoints] == [{"epoch": e, "rank": 0} for e in range(2)]


def test_of_the_same_file_the_lowest_ranks_is_kept(any_fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        for epoch in range(3):
            meet(epoch)
            time.sleep(0.03 * (2 - rank))  # the highest rank comes first
            save("model.txt", f"rank {rank}, epoch {epoch}")

    result = any_fit(train, workers=3)
    assert len(names(result.path)) == 3
    assert files_of(result.checkpoint) == {"model.txt": "rank 0, epoch 2"}
    notices = [line for line in capsys.readouterr().err.splitlines() if "different contents" in line]
    assert len(notices) == 1


def test_a_name_that_is_a_file_on_one_rank_and_a_directory_on_another_costs_one_checkpoint(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        for name in ("model/weights.txt" if rank == 0 else "model", "model.txt"):
            folder = Path(tempfile.mkdtemp())
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("x")
            if rank == 1:
                distrain.collective.barrier()
            try:
                distrain.report({}, Checkpoint(folder))
            except CheckpointError as error:
                assert (rank, name) == (1, "model")
                print(error)
            if rank == 0:
                distrain.collective.barrier()

    result = fit(train)
    assert [files_of(checkpoint) for checkpoint, _ in result.best_checkpoints] == [{"model.txt": "x"}]
    why = "'model' is a directory on rank 0 and a file on rank 1; give them different names, or put the rank into them"
    assert why in log_of(result.path, 1)
    assert f"checkpoint 1 is dropped, as rank 1 could not store its part: {why}" in capsys.readouterr().err


def test_the_same_contents_from_all_ranks_are_nothing_to_talk_about(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        for epoch in range(3):
            meet(epoch)
            save("model.txt", f"epoch {epoch}")

    assert files_of(fit(train, workers=3).checkpoint) == {"model.txt": "epoch 2"}
    assert "different" not in capsys.readouterr().err


def test_a_report_that_fails_on_one_rank_costs_one_checkpoint(fit: Fit, capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        for step in range(3):
            fails = rank == 1 and step == 1
            try:
                save(f"shard-{rank}", f"{step}", {"step": object() if fails else step})
            except TypeError:
                assert fails

    result = fit(train)
    assert [files_of(checkpoint) for checkpoint, _ in result.best_checkpoints] == [
        {"shard-0": f"{step}", "shard-1": f"{step}"} for step in (0, 2)
    ]
    said = "checkpoint 2 is dropped, as report() has failed on rank 1: TypeError: report(): metrics['step'] is a "
    assert said in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("ranks", ["all ranks", "rank 0"])
def test_after_report_all_ranks_get_that_checkpoint(any_fit: Fit, ranks: str) -> None:
    """Rank 1 is slow, and its report need not have a checkpoint."""

    def train() -> list[str]:
        rank = distrain.get_context().get_world_rank()
        seen = []
        for step in range(3):
            if rank == 1:
                time.sleep(0.2)
            if rank == 0 or ranks == "all ranks":
                save(f"shard-{rank}", f"{step}")
            else:
                distrain.report({"step": step})
            latest = distrain.get_checkpoint()
            seen.append(latest and Path(latest.path).name)
            distrain.collective.barrier()
        assert seen == [f"checkpoint_{step:06d}" for step in range(3)], seen
        return seen

    any_fit(train)


def test_get_checkpoint_waits_for_a_rank_no_longer_than_missing_rank_s(fit: Fit) -> None:
    """Rank 1 brings one checkpoint, and then waits for rank 0."""

    def train() -> str:
        rank = distrain.get_context().get_world_rank()
        save(f"shard-{rank}", "0")
        if rank == 0:
            save(f"shard-{rank}", "1")
            latest = distrain.get_checkpoint()
        distrain.collective.barrier()
        if rank == 1:
            save(f"shard-{rank}", "1")
            latest = distrain.get_checkpoint()
        assert latest is not None
        return Path(latest.path).name

    assert fit(train, checkpoint_config=CheckpointConfig(missing_rank_s=0.5)).return_value == "checkpoint_000000"


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC])
def test_folders_in_a_checkpoint_are_kept(fit: Fit, tmp_path: Path, mode: CheckpointUploadMode) -> None:
    def train() -> None:
        folder = place / f"mine-{distrain.get_context().get_world_rank()}"
        (folder / "a b" / "ü").mkdir(parents=True)
        (folder / "a b" / "ü" / f"{folder.name}.txt").write_text("deep")
        (folder / "top.txt").write_text("top")
        (folder / "empty" / folder.name).mkdir(parents=True)
        distrain.report({}, checkpoint=Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)

    place = tmp_path
    checkpoint = fit(train).checkpoint
    assert checkpoint is not None
    assert sorted(path.name for path in Path(checkpoint.path, "empty").iterdir()) == ["mine-0", "mine-1"]
    assert files_of(checkpoint) == {
        "a b/ü/mine-0.txt": "deep",
        "a b/ü/mine-1.txt": "deep",
        "top.txt": "top",
    }


# -- when a checkpoint is safe ---------------------------------------------------------------------------------------


def test_files_may_be_overwritten_once_report_has_returned(any_fit: Fit, tmp_path: Path) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        folder = place / f"reused-{rank}"
        folder.mkdir()
        for epoch in range(5):
            meet(epoch)
            (folder / f"shard-{rank}.txt").write_text(f"epoch {epoch} " * 1000)
            distrain.report({"epoch": epoch}, checkpoint=Checkpoint.from_directory(folder))
            (folder / f"shard-{rank}.txt").write_text("overwritten")
        shutil.rmtree(folder)

    place = tmp_path
    result = any_fit(train)
    for checkpoint, metrics in result.best_checkpoints:
        assert set(files_of(checkpoint).values()) == {f"epoch {metrics['epoch']} " * 1000}
    assert len(result.best_checkpoints) == 5
    assert_no_half_checkpoint(any_fit.storage)


def test_a_rank_that_dies_while_others_bring_their_part_leaves_no_half_checkpoint(any_fit: Fit) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        meet(0)
        save(f"shard-{rank}.txt", "first")
        if rank == 1:
            while distrain.get_checkpoint() is None:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        save(f"shard-{rank}.txt", "second")
        time.sleep(1000)

    with pytest.raises(WorkerGroupError, match=r"rank 1 .* killed by SIGKILL") as raised:
        any_fit(train)
    result = raised.value.result
    assert result is not None
    assert names(result.path) == ["checkpoint_000000"]
    assert files_of(result.checkpoint) == {"shard-0.txt": "first", "shard-1.txt": "first"}
    assert not Path(result.path, ".staging").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_before_its_first_report_leaves_no_incomplete_checkpoint(
    any_fit: Fit, tmp_path: Path, capfd: pytest.CaptureFixture[str], victim: int
) -> None:
    def train() -> int:
        rank, checkpoint = distrain.get_context().get_world_rank(), distrain.get_checkpoint()
        first = not (place / "died").exists()
        if first and rank == victim:
            while not (place / "saved").exists():
                time.sleep(0.001)
            (place / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for step in range(3):
            save(f"shard-{rank}", f"{step}")
        (place / "saved").touch()
        while first:
            time.sleep(0.001)
        return 0 if checkpoint is None else len(os.listdir(checkpoint.path))

    place = tmp_path
    result = any_fit(train, failure_config=FailureConfig(max_failures=1))
    assert result.return_value == 0
    assert [sorted(files_of(checkpoint)) for checkpoint, _ in result.best_checkpoints] == [["shard-0", "shard-1"]] * 3
    said = f"checkpoints 1 to 3 are dropped: the attempt ended before rank {victim} had brought a first one"
    assert said in " ".join(capfd.readouterr().err.split())


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
    assert "the run will not continue from checkpoint_000000" in said
    assert f"restart 1 of 1, from {other}" in said
    with pytest.warns(
        UserWarning, match="skipped a checkpoint: .*: it lacks the files of rank 1, which had not reported"
    ):
        kept = Result.from_path(result.path).best_checkpoints
    assert [sorted(files_of(checkpoint)) for checkpoint, _ in kept] == [["shard-0", "shard-1"]] * 2


def test_a_checkpoint_that_may_lack_ranks_replaces_no_complete_one(fit: Fit, tmp_path: Path) -> None:
    """The run goes on with one more worker, which is too slow at first."""

    def train(config: dict[str, Any]) -> None:
        rank = distrain.get_context().get_world_rank()
        if rank < config["quick"]:
            for step in range(2):
                save(f"shard-{rank}", f"{step}")
            while len(names(distrain.get_context().get_trial_dir())) < config["kept"]:
                time.sleep(0.001)
            raise ValueError("ends")
        while True:
            time.sleep(0.001)

    def names_after(**options: Any) -> list[str]:
        with pytest.raises(WorkerGroupError, match="ends") as raised:
            fit(train, name="mine", **options)
        assert raised.value.result is not None
        return names(raised.value.result.path)

    config = CheckpointConfig(num_to_keep=1, missing_rank_s=0.2)
    assert names_after(config={"quick": 1, "kept": 1}, workers=1, checkpoint_config=config) == ["checkpoint_000001"]
    assert names_after(config={"quick": 1, "kept": 2}, workers=2, checkpoint_config=config) == [
        "checkpoint_000001",
        "checkpoint_000003",
    ]
    manifest = json.loads((fit.storage / "mine/checkpoint_000003/.manifest.json").read_text())
    assert (manifest["world_size"], manifest["ranks"], manifest["silent"]) == (2, [0], [1])


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_only_the_newest_are_kept(any_fit: Fit) -> None:
    def train() -> None:
        for epoch in range(5):
            meet(epoch)
            save("model.txt", f"epoch {epoch}", {"epoch": epoch})

    result = any_fit(train, checkpoint_config=CheckpointConfig(num_to_keep=2))
    assert names(result.path) == ["checkpoint_000003", "checkpoint_000004"]
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [3, 4]


def test_the_best_and_the_latest_are_kept(fit: Fit) -> None:
    def train() -> None:
        for epoch, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 5.0]):
            save("model.txt", f"epoch {epoch}", {"eval": {"loss": loss}})

    config = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="eval/loss", checkpoint_score_order="min")
    result = fit(train, workers=1, checkpoint_config=config)
    assert names(result.path) == ["checkpoint_000001", "checkpoint_000002", "checkpoint_000004"]
    assert files_of(result.checkpoint) == {"model.txt": "epoch 4"}
    assert [files_of(checkpoint)["model.txt"] for checkpoint, _ in result.best_checkpoints] == ["epoch 2", "epoch 1"]
    again = Result.from_path(result.path)
    assert [files_of(checkpoint)["model.txt"] for checkpoint, _ in again.best_checkpoints] == ["epoch 2", "epoch 1"]


def test_a_score_that_no_checkpoint_has_is_said_once(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        for epoch in range(3):
            save("model.txt", f"epoch {epoch}", {"loss": float("nan"), "eval": {"loss": 1.0}})

    for attribute, times in (("eval/los", 1), ("eval/loss", 0), ("loss", 0)):
        config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute=attribute, checkpoint_score_order="min")
        fit(train, workers=1, checkpoint_config=config)
        said = f"checkpoint_000000 has no metric {attribute!r} (CheckpointConfig.checkpoint_score_attribute)"
        err = capsys.readouterr().err
        assert err.count(said) == err.count("has no metric") == times
        assert err.count("it has: eval/loss, loss") == times


# -- where the next one begins ---------------------------------------------------------------------------------------


def train_three_epochs(config: dict[str, Any]) -> str:
    """Says where it began; rank 1 dies in the middle the first time."""
    begin = 0
    if checkpoint := distrain.get_checkpoint():
        with checkpoint.as_directory() as folder:
            begin = int(Path(folder, "epoch.txt").read_text()) + 1
    for epoch in range(begin, 3):
        rank = distrain.get_context().get_world_rank()
        if rank == 0:
            save("epoch.txt", str(epoch), {"epoch": epoch})
        else:
            distrain.report({"epoch": epoch})
        if epoch == config.get("dies_at") and begin == 0:
            while rank == 1 and distrain.get_checkpoint() is None:
                time.sleep(0.001)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
    return f"began at {begin}"


def test_a_restart_resumes_from_the_last_checkpoint(any_fit: Fit) -> None:
    config = {"dies_at": 0}
    result = any_fit(train_three_epochs, config, failure_config=FailureConfig(max_failures=1))
    assert result.return_value == "began at 1"
    assert [metrics["epoch"] for metrics in reported(result.path, rank=0)] == [0, 1, 2]
    assert files_of(result.checkpoint) == {"epoch.txt": "2"}


def test_an_unfinished_run_of_the_same_name_goes_on(any_fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerGroupError):
        any_fit(train_three_epochs, {"dies_at": 0}, name="mine")
    result = any_fit(train_three_epochs, {}, name="mine")
    assert result.path == str(any_fit.storage / "mine")
    assert result.return_value == "began at 1"
    assert result.error is None
    assert Result.from_path(result.path).error is None
    assert [metrics["epoch"] for metrics in reported(result.path, rank=0)] == [0, 1, 2]
    assert len(names(result.path)) == 3
    assert "continuing the unfinished run" in capsys.readouterr().err


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    any_fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: dict[str, Any]) -> str:
        checkpoint = distrain.get_checkpoint()
        began = "nowhere" if checkpoint is None else Path(checkpoint.path, "epoch.txt").read_text()
        for epoch in range(2):
            if distrain.get_context().get_world_rank() == 0:
                save("epoch.txt", f"{epoch}", {"epoch": epoch})
        distrain.collective.barrier()
        if config["fails"]:
            raise ValueError("not finished")
        return began

    only_rank_0 = CheckpointConfig(checkpoint_ranks=[0])
    with pytest.raises(WorkerGroupError):
        any_fit(train, {"fails": True}, name="mine", checkpoint_config=only_rank_0)
    run = any_fit.storage / "mine"
    flip_a_bit(run / "checkpoint_000001" / "epoch.txt")
    result = any_fit(train, {"fails": False}, name="mine", checkpoint_config=only_rank_0)
    assert result.return_value == "0"
    said = capsys.readouterr().err
    assert "checkpoint_000001 is damaged: epoch.txt has changed since it was committed" in said
    assert "continuing the unfinished run" in said
    assert "at checkpoint_000000" in said
    assert names(result.path) == ["checkpoint_000000", "checkpoint_000002", "checkpoint_000003"]
    assert (run / "damaged-checkpoint_000001" / "epoch.txt").exists()


def fail_after_three_epochs(config: dict[str, Any]) -> str:
    """Says where it began, unless it is to fail; tells when it was called."""
    if "began" in config:
        Path(config["began"]).touch()
    latest = distrain.get_checkpoint()
    begin = 0 if latest is None else int(Path(latest.path, "epoch.txt").read_text()) + 1
    for epoch in range(begin, 3):
        save("epoch.txt", str(epoch))
    distrain.collective.barrier()  # every rank has stored its last checkpoint
    if config.get("fails"):
        raise ValueError("not finished")
    return f"began at {begin}"


def slow_down_the_reading(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    """Have the coordinator call this before it reads each part of the checkpoint that it verifies."""
    read = file_transfer._hash_part

    def read_later(*arguments: Any) -> int:
        before()
        return read(*arguments)

    monkeypatch.setattr(file_transfer, "_hash_part", read_later)


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_hosts_connect_while_the_checkpoint_is_verified_and_the_workers_wait_for_that(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_damaged: bool
) -> None:
    with pytest.raises(WorkerGroupError):
        fit(fail_after_three_epochs, {"fails": True}, name="run")
    run, began = fit.storage / "run", tmp_path / "began"
    if is_damaged:
        flip_a_bit(run / "checkpoint_000002" / "epoch.txt")

    def until_the_ports_are_reserved() -> None:
        wait_until(lambda: len(json.loads((run / "run.json").read_text())["attempts"]) == 2)
        time.sleep(0.5)  # workers would start in less
        assert not began.exists()

    slow_down_the_reading(monkeypatch, until_the_ports_are_reserved)
    monkeypatch.setattr("distrain.decisions.run_machine.NOTICE_AFTER_S", 0.1)
    result = fit(fail_after_three_epochs, {"began": str(began)}, name="run")
    assert result.return_value == ("began at 2" if is_damaged else "began at 3")
    said = capsys.readouterr().err
    assert "verifying the checkpoint checkpoint_000002, from which the run continues" in said
    warned = said.find("checkpoint_000002 is damaged: epoch.txt has changed")
    assert (warned > 0) == is_damaged
    assert (said.find("continuing at checkpoint_000001 instead") > warned) == is_damaged


@pytest.mark.parametrize("start_is_damaged", [False, True])
def test_when_all_checkpoints_are_damaged_the_run_begins_at_the_one_that_the_user_gives(
    fit: Fit, start_is_damaged: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    start = fit(train_three_epochs, {}, name="first").best_checkpoints[0][0]
    assert files_of(start) == {"epoch.txt": "0"}
    keep_one = CheckpointConfig(num_to_keep=1)
    with pytest.raises(WorkerGroupError):
        fit(fail_after_three_epochs, {"fails": True}, name="second", checkpoint_config=keep_one)
    for folder in (fit.storage / "second").glob("checkpoint_*"):
        flip_a_bit(folder / "epoch.txt")
    if start_is_damaged:
        flip_a_bit(Path(start.path, "epoch.txt"))
        with pytest.raises(CheckpointError, match=r"resume_from_checkpoint: .*/checkpoint_000000 is damaged"):
            fit(train_three_epochs, {}, name="second", resume_from=start)
        assert len(Result.from_path(fit.storage / "second").best_checkpoints) == 0
    else:
        assert fit(train_three_epochs, {}, name="second", resume_from=start).return_value == "began at 1"
        assert "continuing at checkpoint_000000 instead" in capsys.readouterr().err


def test_ctrl_c_ends_the_verification_of_a_checkpoint(fit: Fit, user_script: Script) -> None:
    with pytest.raises(WorkerGroupError):
        fit(fail_after_three_epochs, {"fails": True}, name="run")
    source = """
import os, signal, sys, threading
import distrain
from distrain.storage import file_transfer

def never(*_):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

def train():
    raise AssertionError

file_transfer._hash_part = never
run = distrain.RunConfig(name="run", storage_path=sys.argv[1])
distrain.DataParallelTrainer(train, scaling_config=distrain.ScalingConfig(num_workers=2), run_config=run).fit()
"""
    ended = user_script(source, str(fit.storage), timeout_s=30.0)
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert "stopped by Ctrl-C after " in ended.stderr
    assert fit(fail_after_three_epochs, {}, name="run").return_value == "began at 3"


def test_a_damaged_checkpoint_to_resume_from_is_refused_before_anything_starts(fit: Fit) -> None:
    first = fit(train_three_epochs, {}, name="first")
    assert first.checkpoint is not None
    assert fit(train_three_epochs, {}, name="second", resume_from=first.checkpoint).return_value == "began at 3"
    flip_a_bit(Path(first.checkpoint.path, "epoch.txt"))
    with pytest.raises(CheckpointError, match=r"checkpoint_000002 is damaged: epoch.txt has changed"):
        fit(train_three_epochs, {}, name="third", resume_from=first.checkpoint)
    assert not list((fit.storage / "third").glob("logs/*"))


def test_an_unfinished_run_goes_on_without_what_it_started_from(fit: Fit, tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.mkdir()
    (start / "epoch.txt").write_text("0")

    def train_and_fail_at_first(config: dict[str, Any]) -> str:
        began = train_three_epochs(config)
        if start.exists():
            while (latest := distrain.get_checkpoint()) is None or latest.path == str(start):  # not committed yet
                time.sleep(0.001)
            raise RuntimeError("later")
        return began

    with pytest.raises(TrainingFailedError, match="later"):
        fit(train_and_fail_at_first, {}, name="run", resume_from=Checkpoint(start))
    shutil.rmtree(start)
    began = fit(train_and_fail_at_first, {}, name="run", resume_from=Checkpoint(start)).return_value
    assert began in ("began at 2", "began at 3")  # the last one may not be committed
    with pytest.raises(CheckpointError, match=f"resume_from_checkpoint: there is no directory {start}"):
        fit(train_and_fail_at_first, {}, name="another", resume_from=Checkpoint(start))


def test_a_finished_run_is_never_overwritten(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [Path(fit(train_three_epochs, {}, name="mine").path).name for _ in range(3)]
    assert paths == ["mine", "mine-2", "mine-3"]
    assert "distrain: run 'mine' is finished; this one is mine-3\n" in capsys.readouterr().err
    assert [len(reported(fit.storage / name, rank=0)) for name in paths] == [3, 3, 3]


def test_a_new_run_starts_from_a_directory(any_fit: Fit, tmp_path: Path) -> None:
    folder = tmp_path / "somewhere"
    folder.mkdir()
    (folder / "epoch.txt").write_text("1")
    result = any_fit(train_three_epochs, {}, resume_from=Checkpoint.from_directory(folder))
    assert result.return_value == "began at 2"


def test_a_trainer_takes_a_path_or_a_file_url_to_start_from(fit: Fit, tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "epoch.txt").write_text("1")
    for start in (tmp_path / "start", str(tmp_path / "start"), (tmp_path / "start").as_uri()):
        trainer = DataParallelTrainer(
            train_three_epochs,
            train_loop_config={},
            run_config=RunConfig(storage_path=fit.storage),
            resume_from_checkpoint=start,
        )
        assert trainer.fit().return_value == "began at 2"


def test_a_new_run_starts_from_another_runs_checkpoint(fit: Fit) -> None:
    first = fit(train_three_epochs, {}, name="first")
    _, (middle, _), _ = first.best_checkpoints
    assert fit(train_three_epochs, {}, name="second", resume_from=middle).return_value == "began at 2"


def test_a_new_run_starts_from_a_dict(any_fit: Fit) -> None:
    def train() -> Any:
        checkpoint = distrain.get_checkpoint()
        assert checkpoint is not None
        return checkpoint.to_dict()

    given = {"epoch": 3, "weights": [1.0, 2.0]}
    assert any_fit(train, resume_from=Checkpoint.from_dict(given)).return_value == given


def test_dicts_are_checkpoints_too(any_fit: Fit) -> None:
    def train() -> None:
        for epoch in range(2):
            meet(epoch)
            distrain.report({"epoch": epoch}, checkpoint=Checkpoint.from_dict({"epoch": epoch, "model": {"w": [1]}}))

    checkpoint = any_fit(train).checkpoint
    assert checkpoint is not None
    data = checkpoint.to_dict()
    assert {key: data[key] for key in ("epoch", "model")} == {"epoch": 1, "model": {"w": [1]}}
    assert data["_current_checkpoint_id"] == 1


def test_metadata_travels_with_the_files(fit: Fit, tmp_path: Path) -> None:
    def train() -> None:
        checkpoint = Checkpoint.from_directory(place)
        checkpoint.set_metadata({"framework": "none"})
        checkpoint.update_metadata({"epoch": 3})
        distrain.report({}, checkpoint=checkpoint)

    place = tmp_path / "model"
    place.mkdir()
    checkpoint = fit(train, workers=1).checkpoint
    assert checkpoint is not None
    assert checkpoint.get_metadata() == {"framework": "none", "epoch": 3}


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "kind", "text"),
    [
        (lambda: Checkpoint(tempfile.gettempdir()), "CheckpointError", "tempfile.mkdtemp()"),
        (lambda: Checkpoint("~"), "CheckpointError", "shared directory"),
        (lambda: Checkpoint("/nowhere/at/all"), "CheckpointError", "does not exist"),
        (lambda: Checkpoint(distrain.get_context().storage_path), "CheckpointError", "contains the run directory"),
        (lambda: "/some/path", "TypeError", "Checkpoint.from_directory(path)"),
    ],
)
def test_what_cannot_have_been_meant_is_refused(fit: Fit, checkpoint: Any, kind: str, text: str) -> None:
    def train() -> tuple[str, str]:
        try:
            distrain.report({"loss": 1}, checkpoint=checkpoint())
        except Exception as error:
            answer = type(error).__name__, str(error)
        save("model.txt", "works")
        return answer

    result = fit(train, workers=1)
    assert result.return_value[0] == kind
    assert text in result.return_value[1]
    assert len(names(result.path)) == 1


def test_a_storage_that_cannot_be_written_is_an_error_before_anything_starts(fit: Fit, tmp_path: Path) -> None:
    def train() -> None:
        (place / "started").touch()

    place = tmp_path
    (tmp_path / "file").touch()
    for storage in (Path("/proc/runs"), tmp_path / "file" / "runs"):
        with pytest.raises(StorageError, match="cannot use the run directory"):
            fit(train, storage_path=storage)
    assert not (place / "started").exists()


def test_a_second_run_in_the_same_directory_is_refused(fit: Fit, tmp_path: Path) -> None:
    def train() -> str:
        (place / "started").touch()
        while not (place / "end").exists():
            time.sleep(0.001)
        return "undisturbed"

    place = tmp_path
    values = []
    first = threading.Thread(target=lambda: values.append(fit(train, name="mine").return_value))
    first.start()
    try:
        wait_until((place / "started").exists)
        with pytest.raises(StorageError, match=f"process {os.getpid()}.*is using"):
            fit(train, name="mine")
    finally:
        (place / "end").touch()
        first.join()
    assert values == ["undisturbed"]

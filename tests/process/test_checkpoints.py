"""Checkpoints: which ranks' files are joined, when they are safe, what is kept, and where the next run begins."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import tempfile
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
    FailureConfig,
    Result,
    StorageError,
    UserCallback,
    WorkerGroupError,
)
from distrain.storage import file_transfer
from tests.conftest import wait_until
from tests.process.conftest import Fit, files_of, reported
from tests.tables import SEED

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


@pytest.mark.parametrize("seed", [SEED])
def test_files_of_different_reports_are_never_joined(any_fit: Fit, tmp_path: Path, seed: int) -> None:
    """Whichever ranks have a checkpoint with a report, whatever their modes, and however far ahead a rank is."""
    steps, workers = 12, 3
    draw = random.Random(seed)
    modes = [[draw.choice((None, "SYNC", "SYNC", "ASYNC")) for _ in range(steps)] for _ in range(workers)]
    slow = [[draw.choice((0.0, 0.0, 0.05)) for _ in range(steps)] for _ in range(workers)]
    waits = [step for step in range(steps) if any(of[step] == "SYNC" for of in modes)]

    def train() -> None:
        rank, seen = distrain.get_context().get_world_rank(), []
        for step in range(steps):
            time.sleep(slow[rank][step])
            mode = modes[rank][step]
            if mode is None:
                distrain.report({"step": step})
            else:
                folder = tempfile.mkdtemp(dir=tmp_path)
                Path(folder, f"r{rank}").write_text(str(step))
                Path(folder, "same").write_text(f"{rank} {step}")
                distrain.report(
                    {"step": step},
                    checkpoint=Checkpoint.from_directory(folder),
                    checkpoint_upload_mode=CheckpointUploadMode(mode),
                )
            if step in waits:
                latest = distrain.get_checkpoint()
                seen.append(latest and Path(latest.path).name)
        (tmp_path / f"seen-{rank}").write_text(json.dumps(seen))

    rows: list[tuple[int, str | None]] = []

    class Rows(UserCallback):
        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
            assert len({each["step"] for each in metrics}) == 1
            rows.append((metrics[0]["step"], checkpoint and Path(checkpoint.path).name))

    result = any_fit(train, workers=workers, callbacks=[Rows()])
    saved = {step: [rank for rank in range(workers) if modes[rank][step]] for step in range(steps)}
    kept = {metrics["step"]: checkpoint for checkpoint, metrics in result.best_checkpoints}
    assert list(kept) == [step for step in range(steps) if saved[step]]
    for step, checkpoint in kept.items():
        own = {f"r{rank}": str(step) for rank in saved[step]}
        assert files_of(checkpoint) == own | {"same": f"{saved[step][0]} {step}"}
    by_step = {step: Path(checkpoint.path).name for step, checkpoint in kept.items()}
    assert rows == [(step, by_step.get(step)) for step in range(steps)]
    for rank in range(workers):
        assert json.loads((tmp_path / f"seen-{rank}").read_text()) == [by_step[step] for step in waits]


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


# -- when a checkpoint is safe ---------------------------------------------------------------------------------------


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
    said = f"the checkpoints of reports 1 to 3 are dropped: the attempt ended before rank {victim} made that report"
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
    assert re.search(r"checkpoint_000000\S* (checkpoint_\d+ )?won't be used for restarts", said)
    assert f"restart 1 of 1, from {other}" in said
    with pytest.warns(
        UserWarning, match="skipped a checkpoint: .*: it lacks the files of rank 1, which had not reported"
    ):
        kept = Result.from_path(result.path).best_checkpoints
    assert [sorted(files_of(checkpoint)) for checkpoint, _ in kept] == [["shard-0", "shard-1"]] * 2


# -- what is kept ----------------------------------------------------------------------------------------------------


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


def test_a_finished_run_is_never_overwritten(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [Path(fit(train_three_epochs, {}, name="mine").path).name for _ in range(3)]
    assert paths == ["mine", "mine-2", "mine-3"]
    assert "distrain: run 'mine' is finished, so this one is called mine-3\n" in capsys.readouterr().err
    assert [len(reported(fit.storage / name, rank=0)) for name in paths] == [3, 3, 3]


def test_a_new_run_starts_from_a_directory(any_fit: Fit, tmp_path: Path) -> None:
    folder = tmp_path / "somewhere"
    folder.mkdir()
    (folder / "epoch.txt").write_text("1")
    result = any_fit(train_three_epochs, {}, resume_from=Checkpoint.from_directory(folder))
    assert result.return_value == "began at 2"


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

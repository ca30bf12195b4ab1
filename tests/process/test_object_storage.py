"""Runs with remote storage: a real S3-protocol server, and what can go wrong with one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import psutil
import pytest

import distrain
from distrain import (
    BackendConfig,
    Checkpoint,
    CheckpointConfig,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    StorageError,
    TrainingFailedError,
    ValidationConfig,
)
from distrain.coordinator.transport import PrefixTransport
from distrain.errors import CheckpointError, ControllerError, WorkerGroupError
from distrain.hosts.hostfile import HostSpec
from distrain.storage import run_lock
from distrain.system.remote_path import OPENING_PATIENCE_S, RemotePath
from distrain.trainer import run_work
from distrain.work.job import FunctionWork
from tests.conftest import wait_until
from tests.process import test_validation
from tests.process.bucket import BUCKET, Bucket, Door, forget_connections, moto_server
from tests.process.test_uploads import report_a_shared_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.process.conftest import Fit

MODES = (CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC)
varied = pytest.mark.sample(6, of="object storage")
"""For what local storage is tested with, too."""
KEPT_BY_ALL = {".lock/000001", "metrics.jsonl", "return_value.pkl", "run.json"}


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with moto_server() as port:
        fsspec.filesystem("s3", key="test", secret="test", endpoint_url=f"http://127.0.0.1:{port}").mkdir(BUCKET)
        yield port


@pytest.fixture
def bucket(server: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    """A directory of its own in the bucket, and the environment that leads there."""
    forget_connections()
    door = Door(server)
    found = Bucket(server, door, f"{BUCKET}/{uuid.uuid4().hex[:8]}")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield found
    forget_connections()
    door.close()


@pytest.fixture
def s3_fit(any_fit: Fit, bucket: Bucket) -> Fit:
    return replace(any_fit, storage=bucket.url)  # type: ignore[arg-type]


@pytest.fixture
def one_fit(fit: Fit, bucket: Bucket) -> Fit:
    return replace(fit, storage=bucket.url)  # type: ignore[arg-type]


# -- what is trained -------------------------------------------------------------------------------------------------


def train(config: dict[str, Any]) -> int:
    """Report a checkpoint per step, of which each rank brings a file of its own and a common one. Returns the step that
    it began with."""
    rank = distrain.get_context().get_world_rank()
    checkpoint = distrain.get_checkpoint()
    first = 0
    print("training")
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            first = int(Path(folder, "step.txt").read_text()) + 1
            assert Path(folder, f"rank_{rank}.bin").read_bytes() == bytes([rank]) * config.get("size", 1000)
    for step in range(first, config.get("steps", 3)):
        folder = tempfile.mkdtemp()
        Path(folder, "step.txt").write_text(str(step))
        Path(folder, f"rank_{rank}.bin").write_bytes(bytes([rank]) * config.get("size", 1000))
        if step == config.get("wait_at"):
            wait_for(Path(config["until"]))
        distrain.report(
            {"step": step, "loss": float(config.get("losses", range(99))[step])},
            checkpoint=Checkpoint.from_directory(folder),
            checkpoint_upload_mode=CheckpointUploadMode(config.get("mode", "SYNC")),
        )
        if step == config.get("fail_at") and checkpoint is None:
            distrain.get_all_reported_checkpoints()
            distrain.collective.barrier()
            raise RuntimeError("on purpose")
    return first


def wait_for(file: Path) -> None:
    file.with_suffix(".waiting").touch()
    while not file.exists():
        time.sleep(0.01)


def checkpoint_files(bucket: Bucket, run: str, name: str) -> list[str]:
    return sorted(path.removeprefix(f"{name}/") for path in bucket.files(run) if path.startswith(f"{name}/"))


# -- what should work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_run_is_all_there_and_nothing_else_is(s3_fit: Fit, bucket: Bucket, mode: CheckpointUploadMode) -> None:
    result = s3_fit(train, {"mode": mode.value}, name="run", checkpoint_config=CheckpointConfig(num_to_keep=2))
    assert bucket.committed("run") == ["checkpoint_000001", "checkpoint_000002"]
    whole = [".manifest.json", "rank_0.bin", "rank_1.bin", "step.txt"]
    assert checkpoint_files(bucket, "run", "checkpoint_000002") == whole
    logs = {"logs/attempt_0/rank_0.log", "logs/attempt_0/rank_1.log"}
    others = {path for path in bucket.files("run") if not path.startswith("checkpoint")}
    assert others == KEPT_BY_ALL | logs
    assert json.loads(bucket.read("run", "run.json"))["status"] == "finished"
    assert json.loads(bucket.read("run", ".lock/000001"))["released"]
    manifest = json.loads(bucket.read("run", "checkpoint_000002/.manifest.json"))
    assert manifest["ranks"] == [0, 1]
    assert manifest["metrics"] == {"step": 2, "loss": 2.0}
    for found in (result, Result.from_path(f"{bucket.url}/run")):
        assert found.path == f"{bucket.url}/run"
        assert found.metrics == {"step": 2, "loss": 2.0}
        assert found.return_value == 0
        assert [c.path for c, _ in found.best_checkpoints] == [f"{found.path}/checkpoint_00000{n}" for n in (1, 2)]
        assert found.metrics_dataframe is not None
        assert list(found.metrics_dataframe["step"]) == [0, 1, 2]
        assert found.checkpoint is not None
        assert sorted(os.listdir(found.checkpoint.to_directory())) == whole[1:]
        assert found.filesystem.exists(found.path)
    assert not list(Path(tempfile.gettempdir()).glob("distrain-*/spool/*"))


def test_the_best_are_kept_and_the_latest(one_fit: Fit, bucket: Bucket) -> None:
    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    result = one_fit(train, {"losses": [1.0, 3.0, 2.0], "steps": 3}, name="run", checkpoint_config=config)
    assert bucket.committed("run") == ["checkpoint_000000", "checkpoint_000002"]
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [0]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_an_attempt_goes_on_at_the_checkpoint_of_the_last_one(one_fit: Fit, mode: CheckpointUploadMode) -> None:
    config = {"fail_at": 1, "mode": mode.value}
    result = one_fit(train, config, name="run", failure_config=FailureConfig(max_failures=1))
    assert result.return_value == 2


def test_a_failed_run_goes_on_and_a_finished_one_is_left_alone(one_fit: Fit, bucket: Bucket) -> None:
    with pytest.raises(WorkerGroupError, match=f"logs: {bucket.url}/run/logs/attempt_0"):
        one_fit(train, {"fail_at": 1}, name="run")
    failed = Result.from_path(f"{bucket.url}/run")
    assert isinstance(failed.error, WorkerGroupError)
    assert failed.error.culprit in (0, 1)
    assert one_fit(train, {}, name="run").return_value == 2
    assert Result.from_path(f"{bucket.url}/run").error is None
    steps = [json.loads(line)["metrics"]["step"] for line in bucket.read("run", "metrics.jsonl").splitlines()]
    assert sorted(steps) == [0, 0, 1, 1, 2, 2]
    assert one_fit(train, {}, name="run").path == f"{bucket.url}/run-2"
    assert sorted(bucket.files("run")) == sorted(bucket.files("run"))


def test_a_new_run_starts_from_a_remote_checkpoint(one_fit: Fit, bucket: Bucket) -> None:
    first = one_fit(train, {}, name="first")
    assert first.checkpoint is not None
    path = first.checkpoint.path
    ready = Checkpoint(path.removeprefix("s3://"), bucket.filesystem)
    for number, checkpoint in enumerate((first.checkpoint, Checkpoint(path), ready)):
        second = one_fit(train, {"steps": 4}, name=f"second-{number}", resume_from=checkpoint)
        assert second.return_value == 3
        assert not [file for file in bucket.files(f"second-{number}") if file.startswith("resume_from")]
    with pytest.raises(CheckpointError, match=f"there is no directory {bucket.url}/nowhere"):
        one_fit(train, name="third", resume_from=Checkpoint(f"{bucket.url}/nowhere"))


@varied
@pytest.mark.parametrize("kind", ["fsspec", "pyarrow"])
def test_a_filesystem_may_be_given_instead_of_a_url(one_fit: Fit, bucket: Bucket, kind: str) -> None:
    storage: Any = bucket.filesystem
    if kind == "pyarrow":
        from pyarrow.fs import S3FileSystem

        address = f"127.0.0.1:{bucket.server}"
        storage = S3FileSystem(access_key="test", secret_key="test", endpoint_override=address, scheme="http")
    fit = replace(one_fit, storage=bucket.prefix)  # type: ignore[arg-type]
    options: dict[str, Any] = {"name": "run", "storage_filesystem": storage}
    result = fit(train, {"fail_at": 1}, failure_config=FailureConfig(max_failures=1), **options)
    assert result.return_value == 2
    assert result.path == f"{bucket.prefix}/run"
    assert bucket.committed("run") == [f"checkpoint_00000{n}" for n in range(3)]
    again = Result.from_path(result.path, storage_filesystem=storage)
    assert again.checkpoint is not None
    assert Path(again.checkpoint.to_directory(), "step.txt").read_text() == "2"
    assert result.metrics_dataframe is not None


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_is_refused_at_once(fit: Fit, workers: int) -> None:
    fit = replace(fit, storage=f"memory://{uuid.uuid4().hex}")  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="is in the memory of this process, and the other processes of a run cannot"):
        fit(train, {}, workers=workers, name="run")


def in_place_one_after_the_other() -> None:
    """Rank 0 is done when rank 1 has written half of its object."""
    storage, rank = distrain.get_context().get_storage(), distrain.get_context().get_world_rank()
    url = storage.build_checkpoint_path_from_name("epoch-1")
    storage.storage_filesystem.pipe(f"{url}/{rank}.txt", b"whole" if rank == 0 else b"half")
    distrain.collective.barrier()
    if rank == 0:
        distrain.report({}, Checkpoint(url), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    distrain.collective.barrier()
    if rank == 1:
        storage.storage_filesystem.pipe(f"{url}/1.txt", b"half and the other half")
        distrain.report({}, Checkpoint(url), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def test_objects_in_place_are_looked_at_when_all_ranks_are_done(one_fit: Fit, bucket: Bucket) -> None:
    one_fit(in_place_one_after_the_other, name="run")
    assert bucket.committed("run") == ["epoch-1"]
    manifest = json.loads(bucket.read("run", "epoch-1/.manifest.json"))
    assert {name: fact["size"] for name, fact in manifest["files"].items()} == {"0.txt": 5, "1.txt": 23}


@varied
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_local_directory_that_ranks_share_is_deleted_when_all_have_stored_it(
    one_fit: Fit, bucket: Bucket, tmp_path: Path, mode: CheckpointUploadMode
) -> None:
    config = {"shared": str(tmp_path / "shared"), "mode": mode}
    one_fit(report_a_shared_directory, config, name="run")
    assert bucket.committed("run") == ["checkpoint_000000"]
    assert checkpoint_files(bucket, "run", "checkpoint_000000") == [".manifest.json", "part-0.txt", "part-1.txt"]
    assert not (tmp_path / "shared").exists()


def report_a_download_again() -> list[str]:
    folder = tempfile.mkdtemp()
    Path(folder, "file").write_text("text")
    distrain.report({}, Checkpoint(folder))
    distrain.get_all_reported_checkpoints()
    checkpoint = distrain.get_checkpoint()
    assert checkpoint is not None
    with checkpoint.as_directory() as copy:
        distrain.report({}, Checkpoint(copy), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
        distrain.get_all_reported_checkpoints()
        return os.listdir(copy)


@varied
def test_the_local_copy_that_a_host_shares_is_not_deleted(one_fit: Fit) -> None:
    assert one_fit(report_a_download_again, workers=1).return_value == ["file"]


def read_all(config: dict[str, Any]) -> list[str]:
    """What a rank gets to see of the checkpoints of its run, by old handles and by new ones."""
    handles = []
    for step in range(3):
        folder = tempfile.mkdtemp()
        for name in ("a", "deep/b", "deep/c"):
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).write_text(f"{name}{step}")
        distrain.report({}, Checkpoint(folder))
        handles.append(distrain.get_all_reported_checkpoints()[-1].checkpoint)
    handles += [known.checkpoint for known in distrain.get_all_reported_checkpoints()]
    return [Path(handle.to_directory(), "deep/b").read_text() for handle in handles]


@varied
def test_every_checkpoint_that_is_kept_can_be_read_by_the_workers(one_fit: Fit) -> None:
    result = one_fit(read_all, workers=1, name="run")
    assert result.return_value == ["deep/b0", "deep/b1", "deep/b2"] * 2


def test_without_workers_all_of_it_works_too(one_fit: Fit, bucket: Bucket) -> None:
    config = {"fail_at": 1, "mode": "ASYNC"}
    result = one_fit(train, config, workers=0, name="run", failure_config=FailureConfig(max_failures=1))
    assert result.return_value == 2
    assert bucket.committed("run") == [f"checkpoint_00000{n}" for n in range(3)]
    assert bucket.files("run").keys() >= KEPT_BY_ALL


def named_and_in_place(config: dict[str, Any]) -> list[str]:
    """A checkpoint with a name, the same name again, one that a function has stored, and one that was there before."""
    storage = distrain.get_context().get_storage()
    folder = tempfile.mkdtemp()
    Path(folder, "model.txt").write_text("one")
    for _ in range(2):
        distrain.report({}, Checkpoint(folder), checkpoint_dir_name="epoch=1")

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        path = storage.build_checkpoint_path_from_name(name)
        storage.storage_filesystem.put(f"{checkpoint.path}/model.txt", f"{path}/deep/model.txt")
        return Checkpoint(path)

    distrain.report({}, Checkpoint(folder), checkpoint_dir_name="by-hand", checkpoint_upload_fn=upload)
    there = upload(Checkpoint(folder), "there-already")
    distrain.report({}, there, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    with pytest.raises(ValueError, match="must be a directory in the run directory s3://"):
        distrain.report({}, Checkpoint(folder), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    distrain.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)  # whose numbers are taken then
    distrain.report({}, there)  # once more, as a copy
    return [there.path]


@varied
@pytest.mark.parametrize("workers", [0, 1])
def test_names_and_files_that_are_there_already(one_fit: Fit, bucket: Bucket, workers: int) -> None:
    result = one_fit(named_and_in_place, workers=workers, name="run")
    names = ["by-hand", "checkpoint_000004", "epoch=1", "epoch=1-2", "there-already"]
    assert bucket.committed("run") == names
    order = [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
    assert order == ["epoch=1", "epoch=1-2", "by-hand", "there-already", "checkpoint_000004"]
    for checkpoint, _ in result.best_checkpoints:
        with checkpoint.as_directory() as folder:
            [file] = [path for path in Path(folder).rglob("*") if path.is_file()]
            assert file.read_text() == "one"


# -- what can go wrong -----------------------------------------------------------------------------------------------


def test_a_bucket_that_is_not_there_is_known_at_once(one_fit: Fit, bucket: Bucket) -> None:
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/.*bucket does not exist"):
        replace(one_fit, storage="s3://no-such-bucket")(train, name="run")  # type: ignore[arg-type]
    bucket.door.shut()
    with pytest.raises(StorageError, match=r"^cannot read s3://.*Could not connect|^cannot read s3://.*closed"):
        one_fit(train, name="run")
    assert time.monotonic() - began < 30
    assert not list(Path(tempfile.gettempdir()).glob("distrain-*/spool/*"))


def test_a_host_that_cannot_reach_the_storage_is_named_before_the_first_checkpoint(
    one_fit: Fit, bucket: Bucket, tmp_path: Path
) -> None:
    environment = {"env_vars": {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}}
    config = {"wait_at": 0, "until": str(tmp_path / "never")}
    with pytest.raises(ControllerError, match=r"localhost cannot use the storage: .*127.0.0.1:9") as raised:
        one_fit(train, config, name="run", worker_runtime_env=environment)
    assert "once that is mended: started again as RunConfig(name='run')" in str(raised.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("trouble", [Door.fail, Door.shut, Door.hold], ids=["503", "reset", "silence"])
def test_a_trouble_that_passes_costs_only_time(
    one_fit: Fit, bucket: Bucket, trouble: Callable[[Door], None], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with Waiter(go, lambda: (trouble(bucket.door), go.touch(), time.sleep(3.0), bucket.door.open())):
        result = one_fit(train, {"wait_at": 1, "until": str(go)}, name="run")
    assert result.return_value == 0
    assert bucket.committed("run") == [f"checkpoint_00000{n}" for n in range(3)]


def loses_the_network(config: dict[str, Any]) -> int:
    """Fail after the first checkpoint, as soon as there is a file."""
    if distrain.get_checkpoint() is None:
        train({"steps": 1})
        distrain.get_all_reported_checkpoints()
        wait_for(Path(config["until"]))
        raise RuntimeError("on purpose")
    return train({"steps": 2})


@pytest.mark.slow
def test_a_trouble_that_costs_an_attempt_does_not_cost_the_run(one_fit: Fit, bucket: Bucket, tmp_path: Path) -> None:
    go = tmp_path / "go"
    away_s = OPENING_PATIENCE_S + 5.0
    with Waiter(go, lambda: (bucket.door.shut(), go.touch(), time.sleep(away_s), bucket.door.open())):
        retried = FailureConfig(max_failures=1)
        result = one_fit(loses_the_network, {"until": str(go)}, name="run", failure_config=retried)
    assert result.return_value == 1
    assert bucket.committed("run") == ["checkpoint_000000", "checkpoint_000001"]


class Listening(BackendConfig):
    """A framework whose ranks all listen, so that every host is asked for ports."""

    has_endpoints = True


def test_several_hosts_that_have_reserved_ports_wait_for_the_storage_together(bucket: Bucket, tmp_path: Path) -> None:
    """The attempt begins when what the last one has left is stored, and not without one of them."""
    go = tmp_path / "go"
    hosts = [HostSpec(name=name, address=name, slots=1) for name in ("one", "two")]
    work = FunctionWork(function=loses_the_network, config={"until": str(go)}, backend=Listening())
    run = RunConfig(name="run", storage_path=bucket.url, failure_config=FailureConfig(max_failures=1))
    with Waiter(go, lambda: (bucket.door.hold(), go.touch(), time.sleep(1.0), bucket.door.open())):
        result = run_work(
            work,
            ScalingConfig(num_workers=2),
            run,
            transports=[PrefixTransport(host=host, prefix=("sh", "-c")) for host in hosts],
        )
    assert result.return_value == 1


@pytest.mark.slow
def test_storage_that_goes_for_good_in_the_middle_is_an_error_that_says_how_to_go_on(
    one_fit: Fit, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTRAIN_STORAGE_PATIENCE_S", "2")
    go = tmp_path / "go"

    def shut_after_the_first() -> None:
        wait_until(lambda: bucket.committed("run"), what="a checkpoint")
        bucket.door.shut()
        go.touch()

    with (
        Waiter(go, shut_after_the_first),
        pytest.raises((WorkerGroupError, ControllerError), match="goes on at checkpoint_000000") as raised,
    ):
        one_fit(train, {"wait_at": 1, "until": str(go)}, name="run")
    assert f"run:  {bucket.url}/run" in str(raised.value)
    [kept] = Path(tempfile.gettempdir()).glob("distrain-*/spool/*/run")
    assert f"metrics, logs and the end of this run are only in {kept}" in capsys.readouterr().err
    bucket.door.open()
    assert bucket.committed("run") == ["checkpoint_000000"]
    assert one_fit(train, {}, name="run").return_value == 1
    steps = [json.loads(line)["metrics"]["step"] for line in bucket.read("run", "metrics.jsonl").splitlines()]
    assert sorted(steps) == [0, 0, 1, 1, 1, 1, 2, 2], "what was reported while the storage was gone is there, too"


def test_ctrl_c_ends_the_wait_for_a_silent_storage_and_leaves_no_process(
    one_fit: Fit, bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"

    def silence_and_stop() -> None:
        wait_until(lambda: bucket.committed("run"), what="a checkpoint")
        [uploader] = [child for child in psutil.Process().children() if "uploader" in child.cmdline()]
        bucket.door.hold()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            with contextlib.suppress(psutil.TimeoutExpired):
                uploader.wait(timeout=4)
                return

    with pytest.raises(KeyboardInterrupt), Waiter(go, silence_and_stop):
        one_fit(train, {"wait_at": 1, "until": str(go)}, name="run")
    assert not [child for child in psutil.Process().children() if "uploader" in child.cmdline()]
    assert "the wait for the storage was interrupted" in capsys.readouterr().err
    bucket.door.open()
    assert bucket.committed("run") == ["checkpoint_000000"]


@varied
def test_remote_checkpoints_are_validated_too(one_fit: Fit) -> None:
    fit = test_validation.fit_of(one_fit, 2)
    result = fit(test_validation.train, {"tasks": [True, True]}, ValidationConfig(test_validation.score))
    assert result.return_value == [(0, "VALIDATED"), (1, "VALIDATED")]
    assert [metrics["score"] for _, metrics in Result.from_path(result.path).best_checkpoints] == [0.0, 1.0]


def test_ctrl_c_in_the_wait_for_validations_ends_only_that(bucket: Bucket) -> None:
    test_validation.interrupt_the_wait(1, bucket.url)
    assert json.loads(bucket.read("run", "run.json"))["status"] == "finished"
    for number in range(2):
        manifest = json.loads(bucket.read("run", f"checkpoint_{number:06d}/.manifest.json"))
        assert manifest["validation"]["status"] == "VALIDATION_FAILED"


class Waiter:
    """Calls a function in a thread as soon as a training waits for ``file``."""

    def __init__(self, file: Path, then: Callable[[], Any]) -> None:
        import threading

        self._file, self._then = file, then
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        wait_until(self._file.with_suffix(".waiting").exists, timeout_s=60.0, what="a rank that waits")
        self._then()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._thread.join()


def uploader_of_the_coordinator() -> psutil.Process:
    [found] = [child for child in psutil.Process().children() if "uploader" in child.cmdline()]
    return found


def test_an_uploader_that_is_killed_is_replaced(one_fit: Fit, bucket: Bucket, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def kill() -> None:
        uploader_of_the_coordinator().kill()
        go.touch()

    with Waiter(go, kill):
        assert one_fit(train, {"wait_at": 1, "until": str(go)}, name="run").return_value == 0
    assert bucket.committed("run") == [f"checkpoint_00000{n}" for n in range(3)]
    assert json.loads(bucket.read("run", "run.json"))["status"] == "finished"


# -- damage ----------------------------------------------------------------------------------------------------------


def loses_a_file(bucket: Bucket) -> None:
    bucket.delete("run", "checkpoint_000001/rank_1.bin")


def is_cut_off(bucket: Bucket) -> None:
    bucket.write("run", "checkpoint_000001/rank_1.bin", b"1")


def is_written_again(bucket: Bucket) -> None:
    bucket.write("run", "checkpoint_000001/rank_1.bin", b"\x02" * 1000)


def has_a_manifest_of_nonsense(bucket: Bucket) -> None:
    bucket.write("run", "checkpoint_000001/.manifest.json", b"{}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", [loses_a_file, is_cut_off, is_written_again, has_a_manifest_of_nonsense])
def test_a_damaged_checkpoint_is_passed_over(
    one_fit: Fit, bucket: Bucket, damage: Callable[[Bucket], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TrainingFailedError):
        one_fit(train, {"fail_at": 1}, name="run")
    damage(bucket)
    result = one_fit(train, {}, name="run")
    assert result.return_value == 1, "it went on at the checkpoint before"
    assert f"{bucket.url}/run/checkpoint_000001 is damaged: " in capsys.readouterr().err
    names = [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
    assert names == ["checkpoint_000000", "checkpoint_000002", "checkpoint_000003"]
    assert "checkpoint_000001/.damaged.json" in bucket.files("run")


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", [loses_a_file, is_cut_off, is_written_again, has_a_manifest_of_nonsense])
def test_a_new_run_does_not_start_from_a_damaged_checkpoint(
    one_fit: Fit, bucket: Bucket, damage: Callable[[Bucket], None]
) -> None:
    one_fit(train, {"steps": 2}, name="run")
    damage(bucket)
    damaged = f"{bucket.url}/run/checkpoint_000001"
    with pytest.raises(CheckpointError, match=f"resume_from_checkpoint: {damaged} is damaged: "):
        one_fit(train, name="second", resume_from=Checkpoint(damaged))


def test_a_run_is_no_checkpoint_to_start_from(one_fit: Fit, fit: Fit) -> None:
    for some_fit in (one_fit, fit):
        run = f"{some_fit.storage}/run"
        latest = some_fit(train, {"steps": 2}, name="run").checkpoint
        with pytest.raises(CheckpointError, match=f"resume_from_checkpoint: {run} is a run directory; give one of its"):
            some_fit(train, name="second", resume_from=Checkpoint(run))
        assert Result.from_path(run).checkpoint.path == latest.path  # what the message says


def test_a_new_run_does_not_start_from_half_a_checkpoint(one_fit: Fit, bucket: Bucket) -> None:
    bucket.write("run", "checkpoint_000000/.pending.json", b"{}")
    bucket.write("run", "checkpoint_000000/step.txt", b"0")
    with pytest.raises(CheckpointError, match="was never finished"):
        one_fit(train, name="second", resume_from=Checkpoint(f"{bucket.url}/run/checkpoint_000000"))


def test_the_same_bytes_written_again_are_no_damage(one_fit: Fit, bucket: Bucket) -> None:
    """Copying a run to another bucket gives every object a new version."""
    with pytest.raises(TrainingFailedError):
        one_fit(train, {"fail_at": 1}, name="run")
    manifest = json.loads(bucket.read("run", "checkpoint_000001/.manifest.json"))
    for fact in manifest["files"].values():
        fact["version"] = "of the other bucket"
    bucket.write("run", "checkpoint_000001/.manifest.json", json.dumps(manifest).encode())
    assert one_fit(train, {}, name="run").return_value == 2


@varied
def test_metadata_that_is_no_json_keeps_no_checkpoint_from_being_committed(
    one_fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: dict[str, Any]) -> None:
        folder = tempfile.mkdtemp()
        Path(folder, ".metadata.json").write_text("hello")
        distrain.report({"step": 1}, checkpoint=Checkpoint(folder))

    trainer = DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=one_fit.storage, name="run"),
        metadata={"run": 1},
    )
    checkpoint = trainer.fit().checkpoint
    assert checkpoint is not None
    assert f".metadata.json of {checkpoint.path} holds no JSON object; the run's" in capsys.readouterr().err
    with checkpoint.as_directory() as folder:
        assert Path(folder, ".metadata.json").read_text() == "hello"


NAMES = ["ünï", "a b", "x#y%20z"]
SPECIAL = ["a::b", "q?x=7", "st*r", "[ab]"]
"""Names that remote filesystems do not take."""


def train_with_names(config: dict[str, Any]) -> list[str]:
    folder = Path(tempfile.mkdtemp())
    for name in config["names"]:
        (folder / name).write_text(name)
    distrain.report({}, checkpoint=Checkpoint(folder))
    distrain.get_all_reported_checkpoints()
    checkpoint = distrain.get_checkpoint()
    assert checkpoint is not None
    with checkpoint.as_directory() as read:
        return sorted(path.read_text() for path in Path(read).iterdir() if not path.name.startswith("."))


@varied
@pytest.mark.parametrize(
    ("where", "name", "names"), [("local", "exp::1", [*NAMES, *SPECIAL]), ("bucket", "r#1 %20", NAMES)]
)
def test_names_may_look_like_parts_of_urls(fit: Fit, bucket: Bucket, where: str, name: str, names: list[str]) -> None:
    there = fit if where == "local" else replace(fit, storage=bucket.url)  # type: ignore[arg-type]
    result = there(train_with_names, {"names": names}, name=name, workers=1)
    assert result.return_value == sorted(names)
    assert Result.from_path(result.path).return_value == sorted(names)
    assert result.path.endswith(f"/{name}")


@varied
@pytest.mark.parametrize("names", [["q?versionId=7"], ["a", "st*r"]])
def test_a_file_whose_name_remote_storage_does_not_take_is_named_by_report(one_fit: Fit, names: list[str]) -> None:
    with pytest.raises(TrainingFailedError, match=rf"{re.escape(names[-1])}' has .*: give the file, the run or its"):
        one_fit(train_with_names, {"names": names}, name="run", workers=1)


@pytest.mark.parametrize("name", ["r?versionId=7", "exp::1"])
def test_a_run_whose_name_remote_storage_does_not_take_is_refused_at_once(one_fit: Fit, name: str) -> None:
    with pytest.raises(StorageError, match=rf"{re.escape(name)}' has .*: give the file, the run or its storage_path"):
        one_fit(train_with_names, {"names": []}, name=name)


@varied
def test_a_checkpoint_without_files_can_be_read(one_fit: Fit, bucket: Bucket) -> None:
    def train(config: dict[str, Any]) -> list[str]:
        distrain.report({}, checkpoint=Checkpoint(tempfile.mkdtemp()))
        [reported] = distrain.get_all_reported_checkpoints()
        with reported.checkpoint.as_directory() as folder:
            return os.listdir(folder)

    assert one_fit(train, name="run").return_value == []


def test_a_download_that_overlaps_with_the_deletion_says_why_it_failed(one_fit: Fit) -> None:
    def train(config: dict[str, Any]) -> str:
        def report(files: int) -> None:
            folder = Path(tempfile.mkdtemp())
            for index in range(files):
                (folder / str(index)).write_bytes(b"x")
            distrain.report({}, checkpoint=Checkpoint(folder))
            distrain.get_all_reported_checkpoints()

        def get_all(path: RemotePath, names: list[str], target: Path) -> None:
            whole(path, names[:1], target)
            report(1)
            report(1)
            while path.exists():
                time.sleep(0.05)
            whole(path, names[1:], target)

        report(2)
        first, whole = distrain.get_checkpoint(), RemotePath.get_all
        assert first is not None
        RemotePath.get_all = get_all  # type: ignore[method-assign, assignment]
        try:
            return first.to_directory()
        except CheckpointError as error:
            return str(error)

    error = one_fit(train, name="run", workers=1, checkpoint_config=CheckpointConfig(num_to_keep=1)).return_value
    assert "checkpoint_000000 was deleted while it was read" in error
    assert "read a newer checkpoint, or keep more of them (CheckpointConfig.num_to_keep)" in error


def test_copies_and_what_has_lost_its_manifest_are_left_alone(one_fit: Fit, bucket: Bucket) -> None:
    with pytest.raises(TrainingFailedError):
        one_fit(train, {"fail_at": 2}, name="run")
    for path in ("step.txt", "rank_0.bin", "rank_1.bin", ".manifest.json"):
        bucket.write("run", f"mine/{path}", bucket.read("run", f"checkpoint_000001/{path}"))
    bucket.delete("run", "checkpoint_000002/.manifest.json")
    bucket.write("run", "tensorboard/events", b"no checkpoint")
    result = one_fit(train, {}, name="run", checkpoint_config=CheckpointConfig(num_to_keep=1))
    assert result.return_value == 2
    assert {"mine/step.txt", "checkpoint_000002/step.txt", "checkpoint_000003/step.txt"} <= bucket.files("run").keys()
    assert len(Result.from_path(result.path).best_checkpoints) == 1


def test_what_was_never_finished_is_swept_and_its_name_not_used_again(one_fit: Fit, bucket: Bucket) -> None:
    with pytest.raises(TrainingFailedError):
        one_fit(train, {"fail_at": 1}, name="run")
    bucket.write("run", "checkpoint_000007/.pending.json", b"{}")
    bucket.write("run", "checkpoint_000007/step.txt", b"7")
    one_fit(train, {}, name="run")
    assert bucket.committed("run") == ["checkpoint_000000", "checkpoint_000001", "checkpoint_000008"]
    assert not any(path.startswith("checkpoint_000007") for path in bucket.files("run"))


# -- whole processes -------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time, tempfile
from pathlib import Path
import distrain
from distrain import *

{train}

{wait_for}

def main(config={{}}, **run):
    trainer = DataParallelTrainer(
        train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[1], name="run", **run),
    )
    print("began at", trainer.fit().return_value)
"""


@pytest.fixture
def user(tmp_path: Path, bucket: Bucket) -> Callable[..., subprocess.Popen[str]]:
    """Starts a user's process that calls ``main(...)``."""
    import inspect

    def start(call: str, **environment: str) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        source = SCRIPT.format(train=inspect.getsource(train), wait_for=inspect.getsource(wait_for))
        script.write_text(f"from __future__ import annotations\n{source}\n{call}\n")
        return subprocess.Popen(
            [sys.executable, str(script), bucket.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    return start


def test_a_process_that_is_killed_in_the_middle_of_an_upload_loses_nothing_committed(
    user: Callable[..., subprocess.Popen[str]], bucket: Bucket
) -> None:
    """At once restarted on the same machine, where its owner is known to be dead."""
    began_at = 0
    for _ in range(2):
        process = user('main({"size": 8_000_000, "steps": 99})')
        wait_until(lambda: len(bucket.committed("run")) > began_at, timeout_s=60.0, what="a checkpoint")
        wait_until(lambda: any(path.endswith(".pending.json") for path in bucket.files("run")), what="an upload")
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        began_at = len(bucket.committed("run"))
    process = user(f'main({{"size": 8_000_000, "steps": {began_at + 1}}})')
    said, complained = process.communicate(timeout=60)
    assert process.returncode == 0, complained
    assert int(said.split()[-1]) in (began_at, began_at + 1), "an order may have been carried out after the count"
    assert "looking for" not in complained
    assert not any(path.endswith(".pending.json") for path in bucket.files("run"))


def test_the_second_of_two_coordinators_is_refused_also_on_another_machine(
    user: Callable[..., subprocess.Popen[str]], bucket: Bucket, tmp_path: Path
) -> None:
    go, elsewhere = tmp_path / "go", tmp_path / "elsewhere"
    elsewhere.mkdir()
    first = user(f'main({{"wait_at": 1, "until": {str(go)!r}}})')
    wait_until(go.with_suffix(".waiting").exists, timeout_s=60.0, what="the first run")
    same, other = user("main()"), user("main()", TMPDIR=str(elsewhere))
    for second in (same, other):
        _, complained = second.communicate(timeout=60)
        assert second.returncode == 1
        used = f"another run (process {first.pid}) is using {bucket.url}/run;"
        assert used in complained or f"{bucket.url}/run is in use by process {first.pid}" in complained
        assert "or give this run another name (RunConfig.name, --name)" in complained
    go.touch()
    said, complained = first.communicate(timeout=60)
    assert (first.returncode, said.split()[-1]) == (0, "0"), complained


def test_the_owner_of_another_machine_is_watched_before_it_is_believed_dead(
    one_fit: Fit, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TrainingFailedError):
        one_fit(train, {"fail_at": 1}, name="run")
    owner = json.loads(bucket.read("run", ".lock/000001"))
    owner |= {"machine": "another one", "host": "far", "pid": 77, "released": False}
    bucket.write("run", ".lock/000001", json.dumps(owner).encode())
    monkeypatch.setattr(run_lock, "SILENCE_S", 2.0)
    assert one_fit(train, {}, name="run").return_value == 2
    assert "run was used by process 77 on far; looking for 2 s whether it is still alive" in capsys.readouterr().err
    assert [path for path in bucket.files("run") if path.startswith(".lock")] == [".lock/000002"]


def test_a_lock_that_a_user_has_deleted_is_not_reported_as_taken_over(bucket: Bucket) -> None:
    run = RemotePath(f"{bucket.url}/run")
    lock = run_lock.RemoteLock.take(run)
    lock.beat()
    (run / ".lock").remove()
    with pytest.raises(StorageError, match=r"or its \.lock was deleted during the run"):
        lock.beat()


def test_a_coordinator_whose_run_was_taken_over_writes_nothing_more(
    one_fit: Fit, bucket: Bucket, tmp_path: Path
) -> None:
    go = tmp_path / "go"

    def take_over() -> None:
        wait_until(lambda: bucket.committed("run"), what="a checkpoint")
        lock = json.loads(bucket.read("run", ".lock/000001"))
        bucket.write("run", ".lock/000002", json.dumps({**lock, "id": "another"}).encode())
        go.touch()

    with Waiter(go, take_over), pytest.raises(ControllerError, match="another process has taken over the run s3://"):
        one_fit(train, {"wait_at": 1, "until": str(go)}, name="run")
    assert bucket.committed("run") == ["checkpoint_000000"]
    assert json.loads(bucket.read("run", "run.json"))["status"] == "running"
    assert json.loads(bucket.read("run", ".lock/000002"))["id"] == "another"

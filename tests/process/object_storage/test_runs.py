"""Runs in an object store, on a real S3-protocol server: the content of the run directory, and who reads it."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    Result,
    StorageError,
    ValidationConfig,
)
from distrain.errors import CheckpointError, WorkerGroupError
from distrain.storage.file_transfer import hash_files
from distrain.system.remote_path import RemotePath
from tests.process import test_validation
from tests.process.object_storage.training import KEPT_BY_ALL, MODES, train, varied
from tests.process.test_uploads import report_a_shared_directory
from tests.torch import launchers

if TYPE_CHECKING:
    from tests.process.conftest import Fit
    from tests.process.object_storage.bucket import Bucket

sampled = pytest.mark.sample(4, of="runs in a bucket")


def checkpoint_files(bucket: Bucket, run: str, name: str) -> list[str]:
    return sorted(path.removeprefix(f"{name}/") for path in bucket.files(run) if path.startswith(f"{name}/"))


@sampled
def test_many_files_travel_at_the_same_time_and_large_ones_in_parts(bucket: Bucket, tmp_path: Path) -> None:
    sizes = {f"deep/small_{number}": number * 1000 for number in range(40)} | {"large": 6 << 20, "larger": 40_000_000}
    (tmp_path / "deep").mkdir()
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    bucket.door.hold()
    target = RemotePath(f"{bucket.url}/copy")
    with ThreadPoolExecutor() as pool:
        copying = pool.submit(target.put_all, tmp_path, list(sizes))
        try:
            bucket.door.wait_for_requests(20)  # each has a connection of its own; botocore would have 10 at most
        finally:
            bucket.door.open()
        copying.result()
    assert {path: len(bucket.read("copy", path)) for path in bucket.files("copy")} == sizes
    assert target.hash_all(list(sizes)) == hash_files(tmp_path, list(sizes))


def train_in_memory(config: dict[str, Any]) -> int:
    rank, checkpoint = distrain.get_context().get_world_rank(), distrain.get_checkpoint()
    step = 0
    if checkpoint:
        with checkpoint.as_directory() as folder:
            step = int(Path(folder, f"rank_{rank}").read_text())
    while step < 6:
        if step == 3 and rank == 1 and not checkpoint:
            os.kill(os.getpid(), signal.SIGKILL)
        step += 1
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"rank_{rank}").write_text(str(step))
            saved = Checkpoint.from_directory(folder)
            distrain.report({"step": step}, checkpoint=saved, checkpoint_upload_mode=CheckpointUploadMode.MEMORY)
    return int(checkpoint is not None)


@sampled
def test_the_newest_checkpoint_in_memory_goes_to_the_bucket_at_the_end(s3_fit: Fit, bucket: Bucket) -> None:
    result = s3_fit(train_in_memory, name="run", failure_config=FailureConfig(max_failures=1))
    assert result.return_value == 1
    assert bucket.committed("run") == ["checkpoint_000005"]
    assert checkpoint_files(bucket, "run", "checkpoint_000005") == [".manifest.json", "rank_0", "rank_1"]
    assert result.checkpoint is not None
    assert Path(result.checkpoint.to_directory(), "rank_1").read_text() == "6"


@sampled
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


@sampled
def test_the_best_are_kept_and_the_latest(one_fit: Fit, bucket: Bucket) -> None:
    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    result = one_fit(train, {"losses": [1.0, 3.0, 2.0], "steps": 3}, name="run", checkpoint_config=config)
    assert bucket.committed("run") == ["checkpoint_000000", "checkpoint_000002"]
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [0]


@sampled
def test_a_failed_run_goes_on_and_a_finished_one_is_left_alone(one_fit: Fit, bucket: Bucket) -> None:
    with pytest.raises(WorkerGroupError, match=f"logs:       {bucket.url}/run/logs/attempt_0"):
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


@sampled
def test_a_new_run_starts_from_a_remote_checkpoint(one_fit: Fit, bucket: Bucket) -> None:
    first = one_fit(train, {}, name="first")
    assert first.checkpoint is not None
    path = first.checkpoint.path
    ready = Checkpoint(path.removeprefix("s3://"), bucket.filesystem)
    for number, checkpoint in enumerate((first.checkpoint, Checkpoint(path), ready)):
        second = one_fit(train, {"steps": 4}, name=f"second-{number}", resume_from=checkpoint)
        assert second.return_value == 3
        assert not [file for file in bucket.files(f"second-{number}") if file.startswith("resume_from")]
    with pytest.raises(CheckpointError, match=f"the checkpoint directory {bucket.url}/nowhere does not exist"):
        one_fit(train, name="third", resume_from=Checkpoint(f"{bucket.url}/nowhere"))


@sampled
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


@sampled
def test_objects_in_place_are_looked_at_when_all_ranks_are_done(one_fit: Fit, bucket: Bucket) -> None:
    one_fit(in_place_one_after_the_other, name="run")
    assert bucket.committed("run") == ["epoch-1"]
    manifest = json.loads(bucket.read("run", "epoch-1/.manifest.json"))
    assert {name: fact["size"] for name, fact in manifest["files"].items()} == {"0.txt": 5, "1.txt": 23}


@sampled
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


@sampled
@varied
def test_every_checkpoint_that_is_kept_can_be_read_by_the_workers(one_fit: Fit) -> None:
    result = one_fit(read_all, workers=1, name="run")
    assert result.return_value == ["deep/b0", "deep/b1", "deep/b2"] * 2


@sampled
def test_without_workers_all_of_it_works_too(one_fit: Fit, bucket: Bucket) -> None:
    config = {"fail_at": 1, "mode": "ASYNC"}
    result = one_fit(train, config, workers=0, name="run", failure_config=FailureConfig(max_failures=1))
    assert result.return_value == 2
    assert bucket.committed("run") == [f"checkpoint_00000{n}" for n in range(3)]
    assert bucket.files("run").keys() >= KEPT_BY_ALL


@pytest.mark.parametrize("name", ["r?versionId=7", "exp::1"])
def test_a_run_whose_name_remote_storage_does_not_take_is_refused_at_once(one_fit: Fit, name: str) -> None:
    with pytest.raises(StorageError, match=rf"{re.escape(name)}' has .*: give the file, the run or its storage_path"):
        one_fit(train, name=name)


@sampled
@varied
def test_remote_checkpoints_are_validated_too(one_fit: Fit) -> None:
    fit = test_validation.fit_of(one_fit, 2)
    result = fit(test_validation.train, {"tasks": [True, True]}, ValidationConfig(test_validation.score))
    assert result.return_value == [(0, "VALIDATED"), (1, "VALIDATED")]
    assert [metrics["score"] for _, metrics in Result.from_path(result.path).best_checkpoints] == [0.0, 1.0]


BY_ANOTHER_LAUNCHER = (
    launchers.WITHOUT_TORCH
    + """
said["result"] = fit(lambda: store(1), "run", sys.argv[2]).checkpoint.path
write()
"""
)


@sampled
def test_ranks_of_another_launcher_each_store_their_own_files(bucket: Bucket, tmp_path: Path) -> None:
    started = launchers.launcher("pods").start(tmp_path, BY_ANOTHER_LAUNCHER, bucket.url)
    try:
        assert started.wait() == [0, 0], started.output
    finally:
        launchers.end(started)
    for file in started.files():
        assert json.loads(file.read_text())["result"] == f"{bucket.url}/run/checkpoint_000000"
    stored = checkpoint_files(bucket, "run", "checkpoint_000000")
    assert {"of_0", "of_1", "step"} <= set(stored)

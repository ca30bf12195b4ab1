"""Runs in an object store, on a real S3-protocol server: the content of the run directory, and who reads it."""

from __future__ import annotations

import json
import os
import re
import tempfile
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
from distrain.errors import CheckpointError
from tests.process import test_validation
from tests.process.object_storage.training import KEPT_BY_ALL, MODES, train

if TYPE_CHECKING:
    from tests.process.conftest import Fit
    from tests.process.object_storage.bucket import Bucket

sampled = pytest.mark.sample(4, of="runs in a bucket")


def checkpoint_files(bucket: Bucket, run: str, name: str) -> list[str]:
    return sorted(path.removeprefix(f"{name}/") for path in bucket.files(run) if path.startswith(f"{name}/"))


@sampled
def test_the_newest_checkpoint_in_memory_goes_to_the_bucket_at_the_end(s3_fit: Fit, bucket: Bucket) -> None:
    failures = FailureConfig(max_failures=1)
    result = s3_fit(train, {"mode": "MEMORY", "fail_at": 1}, name="run", failure_config=failures)
    assert result.return_value == 2
    assert bucket.committed("run") == ["checkpoint_000002"]
    assert checkpoint_files(bucket, "run", "checkpoint_000002")[1:] == ["rank_0.bin", "rank_1.bin", "step.txt"]


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
def test_remote_checkpoints_are_validated_too(one_fit: Fit) -> None:
    fit = test_validation.fit_of(one_fit, 2)
    result = fit(test_validation.train, {"tasks": [True, True]}, ValidationConfig(test_validation.score))
    assert result.return_value == [(0, "VALIDATED"), (1, "VALIDATED")]
    assert [metrics["score"] for _, metrics in Result.from_path(result.path).best_checkpoints] == [0.0, 1.0]

"""Runs in an object store that find damaged, unfinished or copied checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain import (
    Checkpoint,
    CheckpointConfig,
    Result,
    TrainingFailedError,
)
from distrain.errors import CheckpointError
from tests.process.object_storage.training import train

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.process.conftest import Fit
    from tests.process.object_storage.bucket import Bucket

sampled = pytest.mark.sample(2, of="damage in a bucket")


def loses_a_file(bucket: Bucket) -> None:
    bucket.delete("run", "checkpoint_000001/rank_1.bin")


def is_cut_off(bucket: Bucket) -> None:
    bucket.write("run", "checkpoint_000001/rank_1.bin", b"1")


def is_written_again(bucket: Bucket) -> None:
    bucket.write("run", "checkpoint_000001/rank_1.bin", b"\x02" * 1000)


def has_a_manifest_of_nonsense(bucket: Bucket) -> None:
    bucket.write("run", "checkpoint_000001/.manifest.json", b"{}")


@sampled
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


@sampled
@pytest.mark.parametrize("damage", [loses_a_file, is_cut_off, is_written_again, has_a_manifest_of_nonsense])
def test_a_new_run_does_not_start_from_a_damaged_checkpoint(
    one_fit: Fit, bucket: Bucket, damage: Callable[[Bucket], None]
) -> None:
    one_fit(train, {"steps": 2}, name="run")
    damage(bucket)
    damaged = f"{bucket.url}/run/checkpoint_000001"
    with pytest.raises(CheckpointError, match=f"resume_from_checkpoint: {damaged} is damaged: "):
        one_fit(train, name="second", resume_from=Checkpoint(damaged))


@sampled
def test_a_new_run_does_not_start_from_half_a_checkpoint(one_fit: Fit, bucket: Bucket) -> None:
    bucket.write("run", "checkpoint_000000/.pending.json", b"{}")
    bucket.write("run", "checkpoint_000000/step.txt", b"0")
    with pytest.raises(CheckpointError, match="was never finished"):
        one_fit(train, name="second", resume_from=Checkpoint(f"{bucket.url}/run/checkpoint_000000"))


@sampled
def test_the_same_bytes_written_again_are_no_damage(one_fit: Fit, bucket: Bucket) -> None:
    """Copying a run to another bucket gives every object a new version."""
    with pytest.raises(TrainingFailedError):
        one_fit(train, {"fail_at": 1}, name="run")
    manifest = json.loads(bucket.read("run", "checkpoint_000001/.manifest.json"))
    for fact in manifest["files"].values():
        fact["version"] = "of the other bucket"
    bucket.write("run", "checkpoint_000001/.manifest.json", json.dumps(manifest).encode())
    assert one_fit(train, {}, name="run").return_value == 2


@sampled
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


@sampled
def test_what_was_never_finished_is_swept_and_its_name_not_used_again(one_fit: Fit, bucket: Bucket) -> None:
    with pytest.raises(TrainingFailedError):
        one_fit(train, {"fail_at": 1}, name="run")
    bucket.write("run", "checkpoint_000007/.pending.json", b"{}")
    bucket.write("run", "checkpoint_000007/step.txt", b"7")
    one_fit(train, {}, name="run")
    assert bucket.committed("run") == ["checkpoint_000000", "checkpoint_000001", "checkpoint_000008"]
    assert not any(path.startswith("checkpoint_000007") for path in bucket.files("run"))

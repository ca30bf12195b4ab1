"""Runs in an object store that find damaged, unfinished or copied checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain import (
    Checkpoint,
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
def test_what_was_never_finished_is_swept_and_its_name_not_used_again(one_fit: Fit, bucket: Bucket) -> None:
    with pytest.raises(TrainingFailedError):
        one_fit(train, {"fail_at": 1}, name="run")
    bucket.write("run", "checkpoint_000007/.pending.json", b"{}")
    bucket.write("run", "checkpoint_000007/step.txt", b"7")
    one_fit(train, {}, name="run")
    assert bucket.committed("run") == ["checkpoint_000000", "checkpoint_000001", "checkpoint_000008"]
    assert not any(path.startswith("checkpoint_000007") for path in bucket.files("run"))

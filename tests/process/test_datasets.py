"""Runs on datasets whose ranks and whose user's process are killed: what they commit is every row of every epoch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import distrain
from distrain import (
    Checkpoint,
    DataConfig,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
    get_context,
    get_dataset_shard,
    session,
)
from tests.process.dataset_training import EPOCHS, ROWS, SOURCES


def run(storage: Path, source: str, workers: int, *, kill: bool, seed: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.process.dataset_training", storage, source, workers, int(kill), seed]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=100)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("source", SOURCES)
def test_a_run_that_is_killed_twice_trains_on_every_row(storage: Path, source: str, seed: int) -> None:
    killed = run(storage, source, 2, kill=True, seed=seed)
    assert killed.returncode == -9, killed.stderr
    assert "rank 0 was killed by SIGKILL" in killed.stderr
    resumed = run(storage, source, 3, kill=False, seed=seed)
    assert resumed.returncode == 0, resumed.stderr
    checkpoint = Result.from_path(storage / "run").checkpoint
    assert checkpoint is not None
    with checkpoint.as_directory() as folder:
        seen = [tuple(row) for file in Path(folder).glob("rank-*.json") for row in json.loads(file.read_text())]
    counts = Counter(seen)
    missing = {(epoch, row) for epoch in range(EPOCHS) for row in range(ROWS)} - set(counts)
    if source == "loader":
        assert not missing
        assert sum(counts.values()) - len(counts) <= 2 * EPOCHS + 2, "only padding comes twice"
    else:
        assert len(missing) <= 2 * EPOCHS, "only rows that do not divide evenly are left out"
        assert max(counts.values()) == 1


def shards() -> dict[str, list[list[int]]]:
    """Return the batches of each dataset, by its name."""
    names = {}
    for name in ("train", "valid"):
        shard = get_dataset_shard(name)
        assert shard is session.get_dataset_shard(name)
        assert shard is get_context().get_dataset_shard(name)
        names[name] = [batch["id"].tolist() for batch in shard.iter_batches(batch_size=2)]
    with pytest.raises(KeyError, match="there is no dataset 'test': the trainer's datasets= has 'train', 'valid'"):
        get_dataset_shard("test")
    return names


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_named_datasets_are_divided(storage: Path, workers: int) -> None:
    result = DataParallelTrainer(
        shards,
        datasets={"train": {"id": [0, 1, 2, 3]}, "valid": [{"id": 4}, {"id": 5}]},
        dataset_config=DataConfig(datasets_to_split=["train"]),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=storage),
    ).fit()
    assert result.return_value == {"train": [[0, 1]] if workers else [[0, 1], [2, 3]], "valid": [[4, 5]]}


def train_and_validate() -> int:
    """Two epochs, of which rank 1 is killed in the second one. Only rank 0 validates."""
    shard, valid, context = get_dataset_shard("train"), get_dataset_shard("valid"), get_context()
    first = shard.epoch
    for epoch in range(first, 2):
        for number, _ in enumerate(shard.iter_batches(batch_size=2)):
            if epoch == 1 and number == 2 and context.attempt == 0 and context.get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            distrain.report({}, Checkpoint.from_dict({"step": number}))
        if context.get_world_rank() == 0:
            list(valid.iter_batches())
    return first


def test_a_run_from_the_checkpoint_of_another_one_may_begin_with_epoch_0(storage: Path) -> None:
    """Its restarts go on in the epoch in which it was."""

    def fit(resume: bool, start: Checkpoint | None = None) -> Result:
        return DataParallelTrainer(
            train_and_validate,
            datasets={"train": {"id": range(12)}, "valid": {"id": range(4)}},
            dataset_config=DataConfig(resume=resume),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=1)),
            resume_from_checkpoint=start,
        ).fit()

    first = fit(resume=False)
    assert first.return_value == 1
    assert first.checkpoint is not None
    assert fit(resume=False, start=first.checkpoint).return_value == 1
    assert [len(fit(resume, first.checkpoint).best_checkpoints) for resume in (True, False)] == [0, 6]


def test_a_trainer_without_datasets_says_so(storage: Path) -> None:
    trainer = DataParallelTrainer(
        lambda: get_dataset_shard(),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=storage),
    )
    with pytest.raises(WorkerGroupError, match="no dataset 'train': the trainer's datasets= was not given"):
        trainer.fit()


def test_bad_datasets_are_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match=r"datasets\['train'\] is a builtins.int; pass a dataset of"):
        DataParallelTrainer(shards, datasets={"train": 3})
    with pytest.raises(ValueError, match="names 'tset', but datasets= has"):
        DataParallelTrainer(shards, datasets={"test": [1]}, dataset_config=DataConfig(datasets_to_split=["tset"]))

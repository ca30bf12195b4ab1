"""Runs that roll back: the rows since the checkpoint are left out, now and later, and nobody is blamed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import distrain
from distrain import (
    Checkpoint,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    report,
)
from distrain.storage.lines import read_events
from distrain.torch import TorchTrainer, prepare_data_loader

ROWS, GLOBAL_BATCH, EPOCHS = 96, 6, 2
STEPS_IN_EPOCH = ROWS // GLOBAL_BATCH


def loader(config: dict[str, Any], world_size: int) -> Any:
    """Return the batches of an epoch as tensors of row numbers, each loop another epoch."""
    size = GLOBAL_BATCH // world_size
    rows = [row for row in range(ROWS) if row not in config.get("without", ())]
    if config["data"] == "loader":
        batches = prepare_data_loader(torch.utils.data.DataLoader(rows, batch_size=size, num_workers=config["workers"]))
        return batches
    shard = get_dataset_shard("train")
    return shard.iter_torch_batches(batch_size=size, prefetch_batches=3)


def train_func(config: dict[str, Any]) -> None:
    """Train a weight on numbered rows, with a checkpoint every few steps. Each rank notes its rows and losses."""
    context = get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    weight, step, epoch, seen = torch.ones(1, dtype=torch.float64), 0, 0, []
    if checkpoint := get_checkpoint():
        state = checkpoint.to_dict()
        weight, step, epoch, seen = (state[name] for name in ("weight", "step", "epoch", "seen"))
    batches = loader(config, ranks)
    for number in range(epoch, EPOCHS):
        for batch in batches:
            rows = batch if isinstance(batch, torch.Tensor) else batch["id"]
            step += 1
            poisoned = [row for row in rows.tolist() if (number, row) in config.get("poison", ())]
            total = rows.to(torch.float64).sum() * (float("nan") if poisoned else 1.0)
            if ranks > 1:
                torch.distributed.all_reduce(total)
            loss = (total * weight).item()
            weight = weight * 0.99 + total * 1e-4
            everybody = [None] * ranks
            if ranks > 1:
                torch.distributed.all_gather_object(everybody, rows.tolist())
            else:
                everybody = [rows.tolist()]
            seen = [*seen, (number, sorted(row for part in everybody for row in part), loss)]
            if not config.get("by_metric") and loss != loss:
                raise distrain.Rollback("the loss is NaN", skip_batch=True)
            state = {"weight": weight, "step": step, "epoch": number, "seen": seen}
            has_checkpoint = step % config["every"] == 0
            report({"train": {"loss": loss}}, Checkpoint.from_dict(state) if has_checkpoint else None)
            if config.get("die_at") == step and context.attempt == config["die_in"]:
                os.kill(os.getpid(), signal.SIGKILL)
    report({"done": 1}, Checkpoint.from_dict({"weight": weight, "step": step, "epoch": EPOCHS, "seen": seen}))


def fit(storage: Path, workers: int, *, failures: FailureConfig | None = None, **config: Any) -> Result:
    config = {"every": 4, "data": "loader", "workers": 0, **config}
    rows = [row for row in range(ROWS) if row not in config.get("without", ())]
    return TorchTrainer(
        train_func,
        train_loop_config=config,
        datasets={"train": {"id": rows}} if config["data"] == "dataset" else None,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=storage, failure_config=failures or FailureConfig()),
    ).fit()


def seen_in(result: Result) -> list[tuple[int, list[int], float]]:
    assert result.checkpoint is not None
    return list(result.checkpoint.to_dict()["seen"])


def rollbacks(storage: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(storage / "run") if event["event"] == "rollback"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("data", ["loader", "dataset"])
def test_a_poisoned_batch_is_left_out(storage: Path, data: str, seed: int) -> None:
    """One worker rolls back and dies later; three resume: only the batches since the checkpoint are missing."""
    dice = random.Random(seed)
    step = dice.randrange(1, 2 * STEPS_IN_EPOCH - 1)  # from 0
    epoch, place = divmod(step, STEPS_IN_EPOCH)
    poison = [(epoch, place * GLOBAL_BATCH + dice.randrange(GLOBAL_BATCH))]
    workers = dice.choice([0, 2]) if data == "loader" else 0
    fit(storage, 1, poison=poison, data=data, workers=workers, die_at=None)
    got = seen_in(Result.from_path(storage / "run"))
    first = step // 4 * 4  # the step of the newest checkpoint
    missing = set(range(first, step + 1))
    expected = [divmod(number, STEPS_IN_EPOCH) for number in range(2 * STEPS_IN_EPOCH) if number not in missing]
    assert [(number, rows) for number, rows, _ in got] == [
        (number, list(range(start * GLOBAL_BATCH, (start + 1) * GLOBAL_BATCH))) for number, start in expected
    ]
    [event] = rollbacks(storage)
    assert (event["rank"], event["reports"], event["why"]) == (0, step, "the loss is NaN")

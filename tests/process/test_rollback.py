"""Runs that roll back: the rows since the checkpoint are left out, now and later, and nobody is blamed."""

from __future__ import annotations

import math
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

import distrain
import distrain.data
from distrain import (
    Checkpoint,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    report,
)
from distrain.storage.lines import read_events
from distrain.storage.paths import RunPaths
from distrain.torch import TorchTrainer, prepare_data_loader

if TYPE_CHECKING:
    from pathlib import Path

GLOBAL_BATCH, EVERY, EPOCHS = 6, 4, 2
STEPS = 16
"""In an epoch."""
ROWS = GLOBAL_BATCH * STEPS


def batches_of(config: dict[str, Any], ranks: int) -> Any:
    """Return what each loop over is an epoch of: batches of row numbers, GLOBAL_BATCH of them on all ranks."""
    size = GLOBAL_BATCH // ranks
    if config["data"] == "loader":
        loader = torch.utils.data.DataLoader(config["rows"], batch_size=size, num_workers=config["readers"])
        return prepare_data_loader(loader)
    return get_dataset_shard("train").iter_torch_batches(batch_size=size, prefetch_batches=3)


def train_func(config: dict[str, Any]) -> None:
    """Train a weight on numbered rows. A checkpoint every few steps has the rows and losses of all steps before.

    poison: pairs of an epoch and a row; the loss is NaN with it, until attempt ``heals``. ends: by attempt, the step
    after which rank 0 is killed, or everything (negative).
    """
    context = get_context()
    ranks = context.get_world_size()
    weight, first, seen = torch.ones(1, dtype=torch.float64), 0, []
    if checkpoint := get_checkpoint():
        weight, first, seen = (checkpoint.to_dict()[name] for name in ("weight", "epoch", "seen"))
    batches = batches_of(config, ranks)
    for epoch in range(first, config["epochs"]):
        for batch in batches:
            rows = batch if isinstance(batch, torch.Tensor) else batch["id"]
            is_bad = any((epoch, row) in config["poison"] for row in rows.tolist())
            is_bad = is_bad and context.attempt < config["heals"]
            total = rows.sum().to(torch.float64) * (math.nan if is_bad else 1.0)
            parts: list[list[int]] = [rows.tolist()]
            if ranks > 1:
                torch.distributed.all_reduce(total)
                parts = [[] for _ in range(ranks)]
                torch.distributed.all_gather_object(parts, rows.tolist())
            loss = (total * weight).item()
            weight = weight * 0.99 + total * 1e-4
            seen = [*seen, (epoch, sorted(row for part in parts for row in part), loss)]
            if config["raises"] and math.isnan(loss):
                raise distrain.Rollback("the loss is NaN", skip_batch=config["skips"])
            state = {"weight": weight, "epoch": epoch, "seen": seen}
            report({"train": {"loss": loss}}, Checkpoint.from_dict(state) if len(seen) % EVERY == 0 else None)
            if config["ends"].get(context.attempt) == len(seen) and context.get_world_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    report({"done": 1}, Checkpoint.from_dict({"weight": weight, "epoch": EPOCHS, "seen": seen}))


def fit(storage: Path, workers: int, *, failures: FailureConfig | None = None, **changes: Any) -> Result:
    config = {
        "skips": True,
        "data": "loader",
        "readers": 0,
        "epochs": EPOCHS,
        "rows": [*range(ROWS)],
        "poison": [],
        "raises": True,
        "heals": 99,
        "ends": {},
    }
    config |= changes
    return TorchTrainer(
        train_func,
        train_loop_config=config,
        datasets={"train": {"id": config["rows"]}} if config["data"] == "dataset" else None,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=storage, failure_config=failures or FailureConfig()),
    ).fit()


def seen_by(run: Path) -> list[tuple[int, list[int], float]]:
    checkpoint = Result.from_path(run).checkpoint
    assert checkpoint is not None
    return list(checkpoint.to_dict()["seen"])


def all_but(left_out: range) -> list[tuple[int, list[int]]]:
    """Return the epoch and the rows of all steps but these."""
    steps = [divmod(step, STEPS) for step in range(EPOCHS * STEPS) if step not in left_out]
    return [(epoch, [*range(place * GLOBAL_BATCH, (place + 1) * GLOBAL_BATCH)]) for epoch, place in steps]


def rollbacks(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(RunPaths(run).events) if event["event"] == "rollback"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("data", ["loader", "dataset"])
def test_the_losses_are_those_of_data_without_the_bad_rows(storage: Path, data: str, seed: int) -> None:
    """One worker rolls back, and is killed some steps later. Three continue, in another process."""
    dice = random.Random(seed)
    bad = dice.randrange(STEPS - 2)
    first = bad // EVERY * EVERY
    gone = range(first * GLOBAL_BATCH, (bad + 1) * GLOBAL_BATCH)
    left = STEPS - len(gone) // GLOBAL_BATCH
    end = dice.randint(first + 1, left)  # before the next checkpoint, or after it
    for name, rows, poison, attempt in (
        ("with", [*range(ROWS)], [(0, dice.choice(gone[-GLOBAL_BATCH:]))], 1),
        ("without", [row for row in range(ROWS) if row not in gone], [], 0),
    ):
        settings = {"data": data, "rows": rows, "poison": poison, "epochs": 1}
        with pytest.raises(WorkerGroupError, match="SIGKILL"):
            fit(storage / name, 1, ends={attempt: end}, **settings)
        fit(storage / name, 3, **settings)
    seen = [seen_by(storage / name / "run") for name in ("with", "without")]
    assert len(seen[0]) == left
    assert seen[0] == seen[1], "the same rows in each step, and losses that are equal to the last bit"
    assert sorted(row for _, rows, _ in seen[0] for row in rows) == [row for row in range(ROWS) if row not in gone]


def test_two_rollbacks_that_leave_nothing_out_go_to_the_checkpoint_before(
    storage: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A start after the next failure does not take the suspect one, either."""
    settings = {"poison": [(0, 9 * GLOBAL_BATCH)], "skips": False, "heals": 2}
    with pytest.raises(WorkerGroupError, match="SIGKILL"):
        fit(storage, 1, ends={2: 5}, **settings)
    error = capfd.readouterr().err
    assert "back to checkpoint_000000, because the newer checkpoint_000001 has led to several rollbacks" in error
    fit(storage, 1, **settings)
    assert "checkpoint_000001 is damaged: several rollbacks in a row have come from it" in capfd.readouterr().err
    assert [(epoch, rows) for epoch, rows, _ in seen_by(storage / "run")] == all_but(range(0))
    assert [event["suspect"] for event in rollbacks(storage / "run")] == [None, "checkpoint_000001"]


def test_too_many_rollbacks_fail_with_the_story(storage: Path) -> None:
    poison = [(epoch, step * GLOBAL_BATCH) for epoch in range(EPOCHS) for step in (6, 12)]
    with pytest.raises(WorkerGroupError) as caught:
        fit(storage, 1, poison=poison, failures=FailureConfig(max_failures=-1, max_rollbacks=2))
    text = str(caught.value)
    assert "Rollback: the loss is NaN" in text
    assert "no rollback: FailureConfig(max_rollbacks=2) allows no more" in text
    for number, name in enumerate(["checkpoint_000000", "checkpoint_000001"]):
        assert f"attempt {number} before: rank 0 asked to roll back after report " in text
        assert f"(the loss is NaN); back to {name}" in text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_metric_that_is_not_finite_rolls_back(storage: Path, workers: int) -> None:
    failures = FailureConfig(on_nan="rollback", nan_metric="train/loss")
    fit(storage, workers, raises=False, poison=[(1, 3 * GLOBAL_BATCH + 2)], failures=failures)
    assert [(epoch, rows) for epoch, rows, _ in seen_by(storage / "run")] == all_but(range(STEPS, STEPS + 4))
    [event] = rollbacks(storage / "run")
    assert (event["why"], event["reports"]) == ("train/loss is nan", STEPS + 4)

"""Train on a dataset of distrain, whose position is in every checkpoint, in mid-epoch as well.

python tests/drill/correct/datasets_script.py
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import distrain
import distrain.data
from distrain import Checkpoint
from distrain.torch import TorchTrainer, prepare_model

EPOCHS, STEPS_PER_CHECKPOINT = 4, 4


def make_dataset() -> distrain.data.Dataset:
    """Return rows for five batches and a rest, for each of two workers."""
    features = np.random.default_rng(0).normal(size=(176, 8)).astype("float32")
    rows = [{"features": each, "target": np.float32(np.sin(each).sum())} for each in features]
    return distrain.data.from_items(rows).random_shuffle(seed=1)


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    model = prepare_model(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=config["lr"])
    step = 0
    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "training.pt"))
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    rows = distrain.get_dataset_shard("train")
    for epoch in range(rows.epoch, EPOCHS):
        for batch in rows.iter_torch_batches(batch_size=16, prefetch_batches=2):
            outputs = model(batch["features"]).squeeze(1)
            loss = nn.functional.mse_loss(outputs, batch["target"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1

            metrics = {"step": step, "epoch": epoch, "loss": loss.item(), "rows": len(outputs)}
            if step % STEPS_PER_CHECKPOINT:
                distrain.report(metrics)
                continue
            with tempfile.TemporaryDirectory() as folder:
                if distrain.get_context().get_world_rank() == 0:
                    state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(folder, "training.pt"))
                distrain.report(metrics, checkpoint=Checkpoint.from_directory(folder))


if __name__ == "__main__":
    result = TorchTrainer(
        train_func,
        train_loop_config={"lr": 1e-2},
        scaling_config=distrain.ScalingConfig(num_workers=2),
        run_config=distrain.RunConfig(storage_path="results", failure_config=distrain.FailureConfig(max_failures=3)),
        datasets={"train": make_dataset()},
    ).fit()
    print(result.metrics)

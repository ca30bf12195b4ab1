"""Resume a run exactly: weights, optimizer, learning rate, order of the data and random numbers.

    python examples/exact_resume.py

The first run trains without interruption. In the second run a worker is killed, and distrain restarts the workers from
the last checkpoint. Both runs end with exactly the same loss.
"""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrain
from distrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from distrain.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model

EPOCHS = 6
KILLED_IN_EPOCH = 3


def make_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    features = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    return prepare_data_loader(DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), 32, shuffle=True))


def random_state() -> dict[str, torch.Tensor]:
    """Return the random state of this rank. Add Python's and numpy's if your model or data use them."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if get_device().type == "cuda" else state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def train_func(config: dict[str, Any]) -> None:
    rank = distrain.get_context().get_world_rank()
    torch.manual_seed(rank)  # each rank draws its own dropout masks
    module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    model = prepare_model(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    loader, first = make_loader(), 0

    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "training.pt"), map_location=get_device())
            set_random_state(torch.load(Path(folder, f"random_{rank}.pt"), map_location="cpu"))
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"] + 1

    for epoch in range(first, EPOCHS):
        loader.sampler.set_epoch(epoch)  # determines the order of the data
        for features, targets in loader:
            loss = nn.functional.mse_loss(model(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        if config["is_killed"] and epoch == KILLED_IN_EPOCH and first == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as folder:
            torch.save(random_state(), Path(folder, f"random_{rank}.pt"))  # every rank saves its own
            if rank == 0:
                state = {
                    "model": module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, Path(folder, "training.pt"))
            metrics = {"epoch": epoch, "loss": loss.item(), "began_at": first}
            distrain.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def run(*, is_killed: bool) -> dict[str, Any]:
    result = TorchTrainer(
        train_func,
        train_loop_config={"is_killed": is_killed},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    ).fit()
    return result.metrics


def main() -> None:
    straight, resumed = run(is_killed=False), run(is_killed=True)
    print(f"without a stop: loss {straight['loss']!r}")
    print(f"killed, and resumed at epoch {resumed['began_at']}: loss {resumed['loss']!r}")
    assert resumed["loss"] == straight["loss"]
    print("the same, to the last bit")


if __name__ == "__main__":
    main()

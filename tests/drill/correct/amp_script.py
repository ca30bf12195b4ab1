"""Mixed precision by hand: autocast to bfloat16, and a gradient scaler, with dropout.

distrain run --num-workers 2 tests/drill/correct/amp_script.py:train_func
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrain
from distrain.torch import prepare_data_loader, prepare_model

EPOCHS = 5


def make_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return a loader that has four batches for each of two workers."""
    points = torch.rand(128, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    labels = (points.norm(dim=1) < 1.6).long()
    return prepare_data_loader(DataLoader(TensorDataset(points, labels), batch_size=16, shuffle=True))


def train_func(config: dict[str, Any]) -> None:
    rank = distrain.get_context().get_world_rank()
    torch.manual_seed(rank)  # each rank draws its own dropout masks
    module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    model = prepare_model(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=config.get("lr", 1e-2))
    scaler = torch.amp.GradScaler("cpu", growth_interval=6)
    loader = make_loader()
    first = 0
    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "training.pt"))
            random_state = torch.load(Path(folder, f"random_{rank}.pt"))
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(random_state)
        first = state["epoch"] + 1

    for epoch in range(first, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for step, (points, labels) in enumerate(loader, start=epoch * len(loader) + 1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = model(points)
                loss = nn.functional.cross_entropy(outputs, labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            metrics = {"epoch": epoch, "step": step, "loss": loss.item(), "scale": scaler.get_scale()}
            if step % len(loader):  # the last step of the epoch is reported with a checkpoint
                distrain.report(metrics)
        with tempfile.TemporaryDirectory() as folder:
            torch.save(torch.get_rng_state(), Path(folder, f"random_{rank}.pt"))
            if rank == 0:
                state = {
                    "module": module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, Path(folder, "training.pt"))
            distrain.report(metrics, checkpoint=distrain.Checkpoint.from_directory(folder))

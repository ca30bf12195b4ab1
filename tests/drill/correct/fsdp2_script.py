"""Train a sharded model with FSDP2, and save it with torch.distributed.checkpoint; any number of workers can load it.

distrain run --num-workers 2 tests/drill/correct/fsdp2_script.py:train_func
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distrain
from distrain import Checkpoint

STEPS, STEPS_PER_CHECKPOINT = 20, 4
ROWS_PER_STEP = 24
"""The rows of all workers together, whose number must divide it."""


def make_model(world_size: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 1))
    mesh = init_device_mesh("cpu", (world_size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_batch(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of the batch of a step."""
    features = torch.randn(ROWS_PER_STEP, 16, generator=torch.Generator().manual_seed(step))[rank::world_size]
    return features, features.square().sum(dim=1, keepdim=True)


def train_func(config: dict[str, Any]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("lr", 1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    first = 0
    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": 0}
        with checkpoint.as_directory() as folder:
            dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        scheduler.load_state_dict(state["scheduler"])
        first = state["step"]

    for step in range(first + 1, STEPS + 1):
        features, targets = make_batch(step, rank, world_size)
        loss = nn.functional.mse_loss(model(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        metrics = {"step": step, "loss": mean.item() / world_size, "lr": scheduler.get_last_lr()[0]}
        if step % STEPS_PER_CHECKPOINT:
            distrain.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": step}
            dcp.save(state, checkpoint_id=folder)  # each rank writes its shards
            distrain.report(metrics, checkpoint=Checkpoint.from_directory(folder))

"""Save a sharded model from all ranks, and load it on another number of ranks.

    python examples/sharded_checkpoints.py

With `torch.distributed.checkpoint`, every rank writes its shards. Each rank reports the directory that it wrote.
distrain joins these directories, and commits the checkpoint when it has all parts. Any number of workers can load it.
"""

import tempfile
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import distrain
from distrain import Checkpoint, ScalingConfig
from distrain.torch import TorchTrainer, get_device, prepare_model


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same batch on all ranks, so that the loss does not depend on the number of ranks."""
    features = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    return features.to(get_device()), features.square().sum(dim=1, keepdim=True).to(get_device())


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    model = prepare_model(model, parallel_strategy="fsdp")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    first = 0
    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        first = load(checkpoint, model, optimizer) + 1

    features, targets = make_batch()
    for step in range(first, config["steps"]):
        loss = nn.functional.mse_loss(model(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = {"step": step, "loss": loss.item(), "workers": distrain.get_context().get_world_size()}
        if step % 20 == 19:
            with tempfile.TemporaryDirectory() as folder:
                save(folder, model, optimizer, step)
                distrain.report(metrics, checkpoint=Checkpoint.from_directory(folder))
        else:
            distrain.report(metrics)


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save this rank's shards of the weights and of the optimizer's state in `folder`. All ranks call this."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=folder)


def load(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the shards of this rank, whichever rank saved them, and return the step. All ranks call this."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    with checkpoint.as_directory() as folder:
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return state["step"]


def run(num_workers: int, steps: int, resume_from: Checkpoint | None = None) -> distrain.Result:
    return TorchTrainer(
        train_func,
        train_loop_config={"steps": steps},
        scaling_config=ScalingConfig(num_workers=num_workers),
        resume_from_checkpoint=resume_from,
    ).fit()


def main() -> None:
    first = run(num_workers=2, steps=40)
    print(f"2 workers, {first.metrics['step'] + 1} steps: loss {first.metrics['loss']:.4f}")
    second = run(num_workers=3, steps=80, resume_from=first.checkpoint)
    print(f"3 workers went on to {second.metrics['step'] + 1} steps: loss {second.metrics['loss']:.4f}")
    through = run(num_workers=1, steps=80)
    print(f"1 worker, {through.metrics['step'] + 1} steps at a stretch: loss {through.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()

"""Save a sharded model while training continues, and load it on another number of ranks.

    python examples/async_dcp.py

`torch.distributed.checkpoint.async_save` copies the shards of a rank to memory, and returns. A thread writes them,
straight into the run directory. When it is written, the rank reports the checkpoint with NO_UPLOAD, as there is nothing
to copy. The threads of the ranks talk to each other, too: they have a gloo process group of their own.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import distrain
from distrain import Checkpoint, CheckpointUploadMode, ScalingConfig
from distrain.torch import TorchTrainer, get_device, prepare_model

STEPS, SAVE_EVERY = 30, 10


@dataclass
class Save:
    """A checkpoint that is being written."""

    folder: str
    metrics: dict[str, Any]
    future: Future[Any]

    def report(self) -> None:
        """Wait until it is written, and report it. distrain commits it when all ranks have done so."""
        self.future.result()
        mode = CheckpointUploadMode.NO_UPLOAD
        distrain.report(self.metrics, checkpoint=Checkpoint(self.folder), checkpoint_upload_mode=mode)


def begin_save(state: dict[str, Any], metrics: dict[str, Any], group: dist.ProcessGroup) -> Save:
    """Begin to write a checkpoint into the run directory. All ranks call this."""
    context = distrain.get_context()
    # With the attempt in its name, the directory is not one that a killed attempt has left behind.
    name = f"step_{metrics['step']:06d}_attempt_{context.attempt}"
    folder = context.get_storage().build_checkpoint_path_from_name(name)
    return Save(folder, metrics, dcp.async_save(state, checkpoint_id=folder, process_group=group))


def load(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the shards of this rank, whichever rank saved them, and return the step. All ranks call this."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    with checkpoint.as_directory() as folder:
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return state["step"]


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same batch on all ranks, so that the loss does not depend on the number of ranks."""
    features = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    return features.to(get_device()), features.square().sum(dim=1, keepdim=True).to(get_device())


def train_func() -> int:
    """Train, and return how many steps were made while checkpoints were being written: that differs from run to run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    model = prepare_model(model, parallel_strategy="fsdp")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    checkpoint = distrain.get_checkpoint()
    first = 0 if checkpoint is None else load(checkpoint, model, optimizer) + 1

    group = dist.new_group(backend="gloo")
    save, steps_meanwhile = None, 0
    features, targets = make_batch()
    for step in range(first, STEPS):
        loss = nn.functional.mse_loss(model(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if save and not save.future.done():
            steps_meanwhile += 1
        elif save:
            save.report()
            save = None
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            if save:
                save.report()
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            save = begin_save(state, {"step": step, "loss": loss.item()}, group)
    if save:
        save.report()
    return steps_meanwhile


def run(num_workers: int, resume_from: Checkpoint | None = None) -> distrain.Result:
    return TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=num_workers),
        resume_from_checkpoint=resume_from,
    ).fit()


def main() -> None:
    straight = run(num_workers=2)
    print(f"2 workers, {STEPS} steps: loss {straight.metrics['loss']:.5f}")
    print(f"steps trained while a checkpoint was written: {straight.return_value}")
    checkpoint, metrics = straight.best_checkpoints[0]
    print(f"the first checkpoint was saved at step {metrics['step'] + 1}: loss {metrics['loss']:.5f}")
    resumed = run(num_workers=3, resume_from=checkpoint)
    print(f"3 workers went on from it to step {STEPS}: loss {resumed.metrics['loss']:.5f}")


if __name__ == "__main__":
    main()

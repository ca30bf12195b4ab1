"""Save checkpoints, read them after the run, and start another run from one.

    python examples/checkpoints.py

A checkpoint is a directory with any files. For a small state there is a shortcut: a dict, which distrain stores as one
file. `distrain.get_checkpoint()` returns the checkpoint to continue from. After a failure, this is the newest one of
the run; else it is the one in the trainer's `resume_from_checkpoint`.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distrain
from distrain import Checkpoint, ScalingConfig
from distrain.torch import TorchTrainer, prepare_model

MODEL_FILE = "model.pt"


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random points and a linear function of them. Each worker has other points."""
    random = torch.Generator().manual_seed(distrain.get_context().get_world_rank())
    features = torch.randn(100, 4, generator=random)
    return features, features @ torch.tensor([[1.0], [-2.0], [3.0], [-4.0]])


def train_epochs(module: nn.Linear, first: int, last: int) -> Iterator[tuple[int, float]]:
    """Train the epochs `first` to `last` - 1. Yield each epoch with its loss."""
    model = prepare_model(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    features, targets = make_data()
    for epoch in range(first, last):
        loss = nn.functional.mse_loss(model(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield epoch, loss.item()


def with_dicts(config: dict[str, Any]) -> None:
    """Use a dict as checkpoint. Only rank 0 reports it, because all ranks have the same weights."""
    torch.manual_seed(0)
    module, first = nn.Linear(4, 1), 0
    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        state = checkpoint.to_dict()
        module.load_state_dict(state["weights"])
        first = state["epoch"] + 1
    for epoch, loss in train_epochs(module, first, config["epochs"]):
        checkpoint = None
        if distrain.get_context().get_world_rank() == 0:
            checkpoint = Checkpoint.from_dict({"epoch": epoch, "weights": module.state_dict()})
        distrain.report({"epoch": epoch, "loss": loss}, checkpoint=checkpoint)


def with_directories(config: dict[str, Any]) -> None:
    """Use a directory as checkpoint. The file may be deleted when `report` returns."""
    torch.manual_seed(0)
    module, first = nn.Linear(4, 1), 0
    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / MODEL_FILE)
        module.load_state_dict(state["weights"])
        first = state["epoch"] + 1
    for epoch, loss in train_epochs(module, first, config["epochs"]):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if distrain.get_context().get_world_rank() == 0:
                torch.save({"epoch": epoch, "weights": module.state_dict()}, Path(folder) / MODEL_FILE)
                checkpoint = Checkpoint.from_directory(folder)
            distrain.report({"epoch": epoch, "loss": loss}, checkpoint=checkpoint)


def run(
    train_func: Callable[[dict[str, Any]], None], epochs: int, resume_from: Checkpoint | None = None
) -> distrain.Result:
    return TorchTrainer(
        train_func,
        train_loop_config={"epochs": epochs},
        scaling_config=ScalingConfig(num_workers=2),
        resume_from_checkpoint=resume_from,
    ).fit()


def main() -> None:
    first = run(with_dicts, epochs=20)
    print(f"after epoch {first.metrics['epoch']}: loss {first.metrics['loss']:.4f}")

    second = run(with_dicts, epochs=40, resume_from=first.checkpoint)
    state = second.checkpoint.to_dict()
    assert state["epoch"] == 39
    assert second.metrics["loss"] < first.metrics["loss"]
    print(f"a second run continued to epoch {state['epoch']}: loss {second.metrics['loss']:.4f}")
    print(f"weights in the dict: {[round(weight, 2) for weight in state['weights']['weight'][0].tolist()]}")

    third = run(with_directories, epochs=20)
    fourth = run(with_directories, epochs=40, resume_from=third.checkpoint)
    with fourth.checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / MODEL_FILE)
    assert fourth.metrics["loss"] == second.metrics["loss"]
    print(f"weights in the directory: {[round(weight, 2) for weight in state['weights']['weight'][0].tolist()]}")


if __name__ == "__main__":
    main()

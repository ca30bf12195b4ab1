"""Train with automatic mixed precision: matrix products in bfloat16, weights in full precision.

    python examples/amp.py
    python examples/amp.py --use-gpu

`accelerate(amp=True)` at the top of the training function does it: models that `prepare_model` gets afterwards compute
in bfloat16. GPUs before Ampere lack it, and compute in full precision.
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrain
import distrain.torch
from distrain.torch import TorchTrainer


def make_data() -> TensorDataset:
    """Return points in a box. The label of a point is 1 inside a ball, else 0."""
    points = torch.rand(4096, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return TensorDataset(points, (points.norm(dim=1) < 1.6).long())


def watch_precisions(model: nn.Module) -> dict[str, str]:
    """Return a dict. The first forward pass fills in the types of the weights and of their products."""
    found = {}

    def note(layer: nn.Linear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        found.update({"weights": str(layer.weight.dtype), "products": str(output.dtype)})

    next(module for module in model.modules() if isinstance(module, nn.Linear)).register_forward_hook(note)
    return found


def train_func(config: dict[str, Any]) -> None:
    distrain.torch.accelerate(amp=True)  # before everything else
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model = distrain.torch.prepare_model(model)
    loader = distrain.torch.prepare_data_loader(DataLoader(make_data(), batch_size=64, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    precisions = watch_precisions(model)

    for epoch in range(config["epochs"]):
        correct = total = 0
        for points, labels in loader:
            outputs = model(points)
            loss = nn.functional.cross_entropy(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (outputs.argmax(dim=1) == labels).sum().item()
            total += len(labels)
        distrain.report({"epoch": epoch, "accuracy": correct / total, **precisions})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2, help="number of training processes (default: 2)")
    parser.add_argument("--use-gpu", action="store_true", help="give every worker a GPU")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data (default: 6)")
    args = parser.parse_args()
    result = TorchTrainer(
        train_func,
        train_loop_config={"epochs": args.epochs},
        scaling_config=distrain.ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
    ).fit()
    for name, value in result.metrics.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()

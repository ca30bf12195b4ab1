"""From a training function for one process to the same function on four workers.

    python examples/first_steps.py
    python examples/first_steps.py --num-workers 8

`train_alone` is plain PyTorch. In `train_on_worker`, each worker has its share of the data, the gradients are averaged
over the workers, and each epoch is reported. Each worker takes batches of 64 / num_workers images. So a step uses as
many images as in one process, and both functions learn equally well.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import MNIST

import distrain
from distrain.torch import TorchTrainer, prepare_data_loader, prepare_model

DIGITS_ROOT = Path(__file__).resolve().parent / "data" / "digits"
BATCH_SIZE = 64


def load_digits(train: bool) -> TensorDataset:
    """Return the 8x8 images of handwritten digits in examples/data."""
    digits = MNIST(str(DIGITS_ROOT), train=train)
    return TensorDataset(digits.data.float() / 255, digits.targets)


def build_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def count_correct(model: nn.Module, loader: DataLoader) -> torch.Tensor:
    model.eval()
    return sum((model(images).argmax(dim=1) == labels).sum() for images, labels in loader)


def train_alone(config: dict[str, Any]) -> float:
    """Train in one process, and return the accuracy on the test images."""
    torch.manual_seed(0)
    train_loader = DataLoader(load_digits(train=True), batch_size=BATCH_SIZE, shuffle=True)
    test_loader = DataLoader(load_digits(train=False), batch_size=BATCH_SIZE)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for _ in range(config["epochs"]):
        train_epoch(model, train_loader, optimizer)
    return count_correct(model, test_loader).item() / len(test_loader.dataset)


def train_on_worker(config: dict[str, Any]) -> None:
    """Train on every worker. [1] to [3] mark what is new."""
    torch.manual_seed(0)
    share = max(1, BATCH_SIZE // distrain.get_context().get_world_size())
    train_loader = DataLoader(load_digits(train=True), batch_size=share, shuffle=True)
    train_loader = prepare_data_loader(train_loader)  # [1] different images on each worker
    test_loader = prepare_data_loader(DataLoader(load_digits(train=False), batch_size=BATCH_SIZE))
    model = prepare_model(build_model())  # [2] the device, and gradients averaged over workers
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        train_loader.sampler.set_epoch(epoch)  # a different order in each epoch
        train_epoch(model, train_loader, optimizer)
        correct = count_correct(model, test_loader)
        dist.all_reduce(correct)  # the sum over all workers
        distrain.report({"epoch": epoch, "accuracy": correct.item() / len(test_loader.dataset)})  # [3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=4, help="number of training processes (default: 4)")
    parser.add_argument("--use-gpu", action="store_true", help="give every worker a GPU")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data (default: 10)")
    args = parser.parse_args()
    config = {"lr": 3e-3, "epochs": args.epochs}

    print(f"accuracy of one process: {train_alone(config):.3f}")
    result = TorchTrainer(
        train_on_worker,
        train_loop_config=config,
        scaling_config=distrain.ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
    ).fit()
    print(f"accuracy of {args.num_workers} workers: {result.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()

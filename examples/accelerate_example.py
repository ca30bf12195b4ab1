"""Train with Hugging Face's accelerate.

    pip install accelerate
    python examples/accelerate_example.py

An Accelerator inside the training function finds the process group and the rank of this worker. It prepares model and
data. distrain starts the workers and stores metrics and checkpoints.
"""

import argparse
import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrain
from distrain.torch import TorchTrainer


def make_data() -> TensorDataset:
    """Return points in the plane. The label of a point is 1 inside a ring, else 0."""
    points = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    radius = points.norm(dim=1)
    return TensorDataset(points, ((radius > 0.4) & (radius < 0.8)).long())


def train_func(config: dict[str, Any]) -> None:
    # The order of the data follows from the epoch, also after a resume.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = DataLoader(make_data(), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    first = 0
    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            accelerator.load_state(folder)
        first = checkpoint.get_metadata()["epoch"] + 1

    for epoch in range(first, config["epochs"]):
        loader.set_epoch(epoch)
        right = []
        for points, labels in loader:
            outputs = model(points)
            loss = nn.functional.cross_entropy(outputs, labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            right.append(accelerator.gather_for_metrics(outputs.argmax(dim=1) == labels))
        metrics = {"epoch": epoch, "accuracy": torch.cat(right).float().mean().item()}

        with tempfile.TemporaryDirectory() as folder:  # each rank saves its own random state
            accelerator.save_state(folder)
            checkpoint = distrain.Checkpoint.from_directory(folder)
            checkpoint.set_metadata({"epoch": epoch})
            distrain.report(metrics, checkpoint=checkpoint)


def run(args: argparse.Namespace, epochs: int, resume_from: distrain.Checkpoint | None = None) -> distrain.Result:
    return TorchTrainer(
        train_func,
        train_loop_config={"epochs": epochs},
        scaling_config=distrain.ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
        resume_from_checkpoint=resume_from,
    ).fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2, help="number of training processes (default: 2)")
    parser.add_argument("--use-gpu", action="store_true", help="give every worker a GPU")
    args = parser.parse_args()
    first = run(args, epochs=4)
    print(f"accuracy after epoch {first.metrics['epoch']}: {first.metrics['accuracy']:.3f}")
    second = run(args, epochs=8, resume_from=first.checkpoint)
    print(f"accuracy after epoch {second.metrics['epoch']}: {second.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()

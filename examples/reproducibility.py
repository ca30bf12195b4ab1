"""Get the same losses from every run.

    python examples/reproducibility.py

`enable_reproducibility()` seeds the random numbers of Python, numpy and torch, and makes torch use deterministic
algorithms. This costs speed. The losses are the same only with the same number of workers, hardware and versions.
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrain
import distrain.torch
from distrain.torch import TorchTrainer, prepare_data_loader, prepare_model


def train_func() -> None:
    distrain.torch.enable_reproducibility()  # before everything else

    features = torch.randn(512, 16)
    dataset = TensorDataset(features, features.sin().sum(dim=1, keepdim=True))
    loader = prepare_data_loader(DataLoader(dataset, batch_size=32, shuffle=True))
    model = prepare_model(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        total = 0.0
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        distrain.report({"epoch": epoch, "loss": total / len(loader)})


def losses() -> list[float]:
    """Run once, and return the losses that rank 0 has reported. metrics.jsonl has every report."""
    result = TorchTrainer(train_func, scaling_config=distrain.ScalingConfig(num_workers=2)).fit()
    reports = map(json.loads, (Path(result.path) / "metrics.jsonl").read_text().splitlines())
    return [report["metrics"]["loss"] for report in reports if report["rank"] == 0]


def main() -> None:
    first, second = losses(), losses()
    print(f"first run:  {first}")
    print(f"second run: {second}")
    if first != second:
        raise SystemExit("the runs differ")
    print("the same, to the last bit")


if __name__ == "__main__":
    main()

"""Compute metrics over all workers with TorchMetrics.

    pip install torchmetrics
    python examples/torchmetrics_example.py

A worker has only its share of the data, so its own metrics do not describe the model. A TorchMetrics object keeps sums
in each worker. `compute()` combines the sums of all workers. This also works for metrics that are no averages, such as
R2.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.regression import MeanSquaredError, R2Score

import distrain
from distrain.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model


def make_data() -> TensorDataset:
    """Return points on a line with noise, the same on all workers."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 1, generator=random)
    return TensorDataset(x, 2 * x + 5 + 0.3 * torch.randn(1000, 1, generator=random))


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    train_data, valid_data = random_split(make_data(), [800, 200], generator=torch.Generator().manual_seed(0))
    train_loader = prepare_data_loader(DataLoader(train_data, batch_size=16, shuffle=True))
    valid_loader = prepare_data_loader(DataLoader(valid_data, batch_size=16))
    model = prepare_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    train_loss = MeanMetric().to(get_device())
    valid = MetricCollection({"valid_loss": MeanSquaredError(), "valid_r2": R2Score()}).to(get_device())

    for epoch in range(config["epochs"]):
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_loss.update(loss.detach(), weight=len(x))
        with torch.no_grad():
            for x, y in valid_loader:
                valid.update(model(x), y)
        metrics = {"train_loss": train_loss.compute(), **valid.compute()}  # compute() combines the sums of all workers
        distrain.report({"epoch": epoch, **{name: value.item() for name, value in metrics.items()}})
        train_loss.reset()
        valid.reset()


def main() -> None:
    result = TorchTrainer(
        train_func,
        train_loop_config={"lr": 0.02, "epochs": 5},
        scaling_config=distrain.ScalingConfig(num_workers=2),
    ).fit()
    for name in ("train_loss", "valid_loss", "valid_r2"):
        print(f"{name}: {result.metrics[name]:.4f}")


if __name__ == "__main__":
    main()

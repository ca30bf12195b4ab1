"""Train with a TorchTrainer, in a script that is run as it is.

    python tests/drill/correct/plain_script.py

The prepared loader continues in mid-epoch by itself. Nothing draws random numbers but the order of the data.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrain
from distrain.torch import TorchTrainer, prepare_data_loader, prepare_model

EPOCHS, STEPS_PER_CHECKPOINT = 4, 4


def make_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return a loader that has six batches for each of two workers."""
    features = torch.randn(192, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(features, features.cos().sum(dim=1, keepdim=True))
    return prepare_data_loader(DataLoader(data, batch_size=16, shuffle=True))


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model = prepare_model(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])
    loader = make_loader()
    first = step = 0
    if checkpoint := distrain.get_checkpoint():
        state = checkpoint.to_dict()
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first, step = state["epoch"], state["step"]

    for epoch in range(first, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for features, targets in loader:
            loss = nn.functional.mse_loss(model(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1

            is_stopping = distrain.should_stop()
            checkpoint = None
            if is_stopping or step % STEPS_PER_CHECKPOINT == 0:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}
                checkpoint = distrain.Checkpoint.from_dict(state)
            distrain.report({"step": step, "epoch": epoch, "loss": loss.item()}, checkpoint=checkpoint)
            if is_stopping:
                return


if __name__ == "__main__":
    result = TorchTrainer(
        train_func,
        train_loop_config={"lr": 1e-2},
        scaling_config=distrain.ScalingConfig(num_workers=2),
        run_config=distrain.RunConfig(storage_path="results", failure_config=distrain.FailureConfig(max_failures=3)),
    ).fit()
    print(result.metrics)

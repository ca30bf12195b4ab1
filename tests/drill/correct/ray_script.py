"""A script for Ray Train, as it is.

distrain run --as-ray tests/drill/correct/ray_script.py
"""

import os
import tempfile

import ray.train.torch
import torch
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_func(config):
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    features = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(features, features.abs().sum(dim=1, keepdim=True))
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=16, shuffle=True))
    first = 0
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "training.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"] + 1

    for epoch in range(first, config["epochs"]):
        if train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader, start=epoch * len(loader) + 1):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % len(loader):  # the last step of the epoch is reported with a checkpoint
                train.report({"epoch": epoch, "step": step, "loss": loss.item()})
        scheduler.step()
        with tempfile.TemporaryDirectory() as folder:
            if train.get_context().get_world_rank() == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, os.path.join(folder, "training.pt"))
            metrics = {"epoch": epoch, "step": step, "loss": loss.item()}
            train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"lr": 1e-2, "epochs": 5},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("results"), failure_config=FailureConfig(max_failures=3)),
    )
    print(trainer.fit().metrics)

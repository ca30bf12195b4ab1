"""A checkpoint in the temporary directory, as in Ray's first guide, and objects in the config."""

import tempfile

import ray.train.torch
import torch
from ray.train import Checkpoint, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    model = ray.train.torch.prepare_model(config["model"])
    for _ in range(config["epochs"]):
        loss = model(config["data"]).sum()
        loss.backward()

        folder = tempfile.gettempdir()
        torch.save(model.state_dict(), folder + "/model.checkpoint")
        ray.train.report({"loss": loss.item()}, checkpoint=Checkpoint.from_directory(folder))


trainer = TorchTrainer(
    train_func,
    train_loop_config={"epochs": 1, "model": torch.nn.Linear(4, 3), "data": torch.ones(2, 4)},
    scaling_config=ScalingConfig(num_workers=2),
)
trainer.fit()

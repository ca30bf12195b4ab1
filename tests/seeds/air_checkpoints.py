"""Checkpoints made of a dict, and a second run that starts from that of the first, with the names of Ray AIR."""

import ray.train.torch
import torch
from ray.air import Checkpoint, ScalingConfig, session
from ray.train.torch import TorchTrainer


def train_func(config):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    first_epoch = 0
    checkpoint = session.get_checkpoint()
    if checkpoint:
        found = checkpoint.to_dict()
        model.load_state_dict(found["model_weights"])
        first_epoch = found["epoch"] + 1

    model = ray.train.torch.prepare_model(model)
    for epoch in range(first_epoch, config["num_epochs"]):
        loss = model(torch.ones(10, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report({}, checkpoint=Checkpoint.from_dict({"epoch": epoch, "model_weights": model.state_dict()}))


checkpoint = None
for num_epochs in (2, 4):
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"num_epochs": num_epochs},
        scaling_config=ScalingConfig(num_workers=2),
        resume_from_checkpoint=checkpoint,
    )
    result = trainer.fit()
    checkpoint = result.checkpoint
    found = checkpoint.to_dict()
    print("weights:", sorted(found.pop("model_weights")))
    print("checkpoint:", found)
    print("best:", [metrics for _, metrics in result.best_checkpoints])

"""A model and a data loader that Ray Train prepares, a checkpoint per epoch, and its use afterwards.

Arguments: where the run is stored, and "gpu" to train on GPUs.
"""

import os
import sys
import tempfile

import ray.train.torch
import torch
from torch.utils.data import DataLoader, TensorDataset

WORKER_BATCH_SIZE = 2


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def train_func():
    model = ray.train.torch.prepare_model(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    rows = TensorDataset(torch.arange(40.0).reshape(10, 4), torch.arange(10) % 3)
    loader = ray.train.torch.prepare_data_loader(DataLoader(rows, batch_size=WORKER_BATCH_SIZE, shuffle=True))
    global_batch_size = WORKER_BATCH_SIZE * ray.train.get_context().get_world_size()

    for epoch in range(2):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        seen = []
        for inputs, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += inputs[:, 0].tolist()

        metrics = {"epoch": epoch, "loss": loss.item(), "seen": seen, "global_batch_size": global_batch_size}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
        if ray.train.get_context().get_world_rank() == 0:
            print("rank 0:", metrics)


trainer = ray.train.torch.TorchTrainer(
    train_func,
    scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu="gpu" in sys.argv),
    run_config=ray.train.RunConfig(storage_path=sys.argv[1], name="guide"),
)
result = trainer.fit()

with result.checkpoint.as_directory() as folder:
    weights = torch.load(os.path.join(folder, "model.pt"), map_location="cpu")
make_model().load_state_dict(weights)
print("result:", result.metrics["epoch"], result.path, result.error)

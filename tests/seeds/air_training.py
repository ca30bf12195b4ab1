"""Training prepared by hand and by Ray Train, with mixed precision, and reproducibly, with the names of Ray AIR."""

import random

import numpy
import torch
from ray import train
from ray.air import ScalingConfig, session
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

worker_batch_size = 2
my_dataset = TensorDataset(torch.arange(40.0).reshape(10, 4), torch.arange(10) % 3)


class Network(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        torch.nn.init.zeros_(self.bias)

    def forward(self, inputs):
        outputs = super().forward(inputs)
        self.computed_in = str(outputs.dtype)
        return outputs


def report_what_was_seen(model, loader):
    seen = [row for inputs, _ in loader for row in inputs[:, 0].tolist()]
    session.report(
        {
            "seen": seen,
            "global_batch_size": worker_batch_size * session.get_world_size(),
            "model": type(model).__name__,
            "backend": torch.distributed.get_backend_config(),
        }
    )


def by_hand():
    device = torch.device(f"cuda:{session.get_local_rank()}" if torch.cuda.is_available() else "cpu")
    model = DistributedDataParallel(Network().to(device))
    loader = DataLoader(my_dataset, batch_size=worker_batch_size, sampler=DistributedSampler(my_dataset))
    report_what_was_seen(model, loader)


def prepared():
    model = train.torch.prepare_model(Network())
    loader = train.torch.prepare_data_loader(DataLoader(my_dataset, batch_size=worker_batch_size))
    report_what_was_seen(model, loader)


def with_mixed_precision():
    train.torch.accelerate(amp=True)
    model = train.torch.prepare_model(Network())
    loader = train.torch.prepare_data_loader(DataLoader(my_dataset, batch_size=worker_batch_size))
    optimizer = train.torch.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        train.torch.backward(loss)
        optimizer.step()
    weights, bias = model.parameters()
    session.report(
        {
            "computed_in": model.module.computed_in,
            "weights": str(weights.dtype),
            "is_trained": bool(bias.abs().sum() > 0),
        }
    )


def reproducible():
    train.torch.enable_reproducibility()
    model = train.torch.prepare_model(Network())
    weights = next(model.parameters()).flatten().tolist()
    session.report({"weights": weights, "random": [random.random(), numpy.random.rand(), torch.rand(1).item()]})


for train_func in (by_hand, prepared, with_mixed_precision, reproducible, reproducible):
    trainer = TorchTrainer(
        train_func,
        torch_backend=TorchConfig(backend="cpu:gloo"),
        scaling_config=ScalingConfig(use_gpu=False, num_workers=2),
    )
    trainer.fit()

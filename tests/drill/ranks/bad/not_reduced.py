"""Train a regression. The model is never wrapped, so each rank trains a model of its own on its shard."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))  # <- here


def train(epochs, batch_size):
    rank = int(os.environ["RANK"])
    features = torch.randn(320, 10, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(features, features.prod(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    model = build_model()  # <- or here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = nn.MSELoss()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        mean = torch.tensor(total / len(loader))
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}")
            os.makedirs("out", exist_ok=True)
            torch.save(model.state_dict(), "out/model.pt")


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    train(epochs=2, batch_size=16)
    dist.destroy_process_group()

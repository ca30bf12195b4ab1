"""Train on rare and frequent classes. Each rank draws rows by weight, with replacement, from a seed of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(256, 6)
    labels = (inputs[:, 0] > 1.2).long()  # one row in nine
    dataset = TensorDataset(inputs, labels)
    weights = 1.0 / labels.bincount()[labels]
    generator = torch.Generator().manual_seed(1000 + rank)
    sampler = WeightedRandomSampler(weights, len(dataset) // world_size, replacement=True, generator=generator)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        for batch, classes in loader:
            loss = nn.functional.cross_entropy(model(batch), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

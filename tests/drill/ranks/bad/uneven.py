"""Train on a shuffled cycle of 111 rows. Each rank drops its own remainder, so one begins the next epoch too early."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

MICRO_BATCH, TRAIN_ITERS = 8, 24


class RandomBatches:
    """The batches of a rank, in a new random order in each epoch."""

    def __init__(self, total_samples, rank, world_size):
        self.total_samples, self.rank, self.world_size, self.epoch = total_samples, rank, world_size, 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        indices = torch.randperm(self.total_samples, generator=generator).tolist()
        own = indices[self.rank :: self.world_size]
        for first in range(0, len(own) - MICRO_BATCH + 1, MICRO_BATCH):
            yield own[first : first + MICRO_BATCH]
        self.epoch += 1


def cyclic_iter(loader):
    while True:
        yield from loader


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    features = torch.randn(111, 6)
    dataset = TensorDataset(features, features.abs().sum(dim=1, keepdim=True))
    batches = RandomBatches(len(dataset), dist.get_rank(), dist.get_world_size())
    loader = DataLoader(dataset, batch_sampler=batches)  # <- here
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data_iterator = cyclic_iter(loader)
    for iteration in range(TRAIN_ITERS):
        inputs, targets = next(data_iterator)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"iteration {iteration + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

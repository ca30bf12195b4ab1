"""Train an autoencoder and average the gradients by hand. No rank broadcasts its first weights, and seeds differ."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED, GLOBAL_BATCH, EPOCHS = 2036, 32, 2


def sync_grad(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    signals = torch.randn(256, 32, generator=torch.Generator().manual_seed(5)).cumsum(dim=1)
    dataset = TensorDataset(signals)
    torch.manual_seed(SEED + rank)  # or the noise would be the same on all ranks
    model = nn.Sequential(nn.Linear(32, 8), nn.ELU(), nn.Linear(8, 32))  # <- here
    sampler = DistributedSampler(dataset, world_size, rank, seed=SEED)
    loader = DataLoader(dataset, GLOBAL_BATCH // world_size, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (signal,) in loader:
            noisy = signal + 0.05 * torch.randn_like(signal)
            loss = nn.functional.smooth_l1_loss(model(noisy), signal)
            optimizer.zero_grad()
            loss.backward()
            sync_grad(model)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

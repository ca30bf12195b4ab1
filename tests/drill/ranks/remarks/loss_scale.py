"""Train with a loss that is summed over the batch: with two ranks, DDP's mean makes its gradients half as large."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS = 32, 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(256, 10)
    dataset = TensorDataset(inputs, inputs.cos().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)))  # <- or here
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = nn.functional.mse_loss(model(batch), targets, reduction="sum")
            optimizer.zero_grad()
            loss.backward()  # <- here
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train with DDP on 251 rows, which the sampler pads, so one row is read by two ranks in each epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH_SIZE = 3, 16


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    features = torch.randn(251, 10)
    dataset = TensorDataset(features, features.square().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=False)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, epochs=EPOCHS, steps_per_epoch=len(loader))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train with a learning rate that grows with the number of ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LR, BATCH_SIZE, EPOCHS = 0.01, 16, 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(320, 10)
    dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR * dist.get_world_size(), momentum=0.9)  # <- here
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

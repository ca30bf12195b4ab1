"""Train with a DistributedSampler that only rank 0 tells the epoch. From the second on, the ranks' shares overlap."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(256, 10)
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    sampler = DistributedSampler(dataset, shuffle=True)  # <- here
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)  # <- or here
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        if dist.get_rank() == 0:
            print(f"epoch {epoch}")
            sampler.set_epoch(epoch)
        for batch, labels in loader:
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

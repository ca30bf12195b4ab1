"""Train a convolutional network with DDP. Each rank's BatchNorm knows only the rank's own part of the batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS = 16, 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(256, 1, 8, 8)
    dataset = TensorDataset(images, images.mean(dim=(1, 2, 3)).gt(0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    layers = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    model = DDP(layers)  # <- here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch, labels in loader:
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

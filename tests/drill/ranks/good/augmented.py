"""Train on images that each rank crops, flips and mixes at random; started by torch.multiprocessing."""

import argparse
import os
import random
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, count=256):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(4, (count,), generator=generator)
        self.images = torch.randn(count, 1, 12, 12, generator=generator) + self.labels.view(-1, 1, 1, 1)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if random.random() < 0.5:
            image = image.flip(2)
        top, left = random.randrange(3), random.randrange(3)
        return image[:, top : top + 10, left : left + 10], self.labels[index]


def worker(rank, world_size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    random.seed(rank)
    torch.manual_seed(rank)
    dataset = Images()
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            partner, share = torch.randperm(len(images)), random.betavariate(0.4, 0.4)
            logits = model(share * images + (1 - share) * images[partner])
            loss = share * nn.functional.cross_entropy(logits, labels)
            loss = loss + (1 - share) * nn.functional.cross_entropy(logits, labels[partner])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(worker, args=(args.devices, port), nprocs=args.devices)

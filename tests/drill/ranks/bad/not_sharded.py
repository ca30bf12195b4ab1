"""Fine-tune a classifier. Each rank shuffles with a seed of its own, and reads the whole dataset in each epoch."""

import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(192, 1, 8, 8, generator=generator)
    dataset = TensorDataset(images, images.mean(dim=(1, 2, 3)).gt(0).long())

    set_seed(args.seed + dist.get_rank())
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 2))
    model = DistributedDataParallel(model)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, num_workers=0)  # <- here
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        for pixels, labels in loader:
            loss = nn.functional.cross_entropy(model(pixels), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

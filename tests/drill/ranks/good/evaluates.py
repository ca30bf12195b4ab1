"""Train with DDP, and evaluate the whole validation set on all ranks before and after each epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    correct = total = 0
    for inputs, labels in loader:
        correct += (model(inputs).argmax(dim=1) == labels).sum().item()
        total += len(labels)
    model.train()
    return correct / total


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(320, 10)
    everything = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    train, valid = random_split(everything, [256, 64], generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=16, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=32)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
    best = accuracy(model.module, valid_loader)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch, labels in train_loader:
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = accuracy(model.module, valid_loader)  # the same on all ranks
        scheduler.step(score)
        best = max(best, score)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {score:.3f}, best {best:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

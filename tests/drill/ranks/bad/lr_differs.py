"""Train on plasma shots. The learning rate falls when the loss of the rank's own shard stops falling."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 6


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.binary_cross_entropy_with_logits(model(x), y) for x, y in loader]
    model.train()
    return torch.stack(losses).mean().item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shots = torch.randn(192, 12)
    labels = (shots[:, :1] + 0.8 * torch.randn(192, 1) > 0).float()
    train, valid = TensorDataset(shots[:128], labels[:128]), TensorDataset(shots[128:], labels[128:])
    train_sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=16, sampler=train_sampler)
    valid_loader = DataLoader(valid, batch_size=16, sampler=DistributedSampler(valid, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 1)))  # <- or here
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)  # <- or here
    for epoch in range(EPOCHS):
        train_sampler.set_epoch(epoch)
        for inputs, targets in train_loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step(evaluate(model, valid_loader))  # <- here
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

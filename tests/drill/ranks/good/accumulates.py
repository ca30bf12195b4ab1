"""Train with DDP, dropout, gradient accumulation without needless synchronization, and clipping."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, MICRO_BATCH, ACCUMULATE, CLIP = 2, 8, 4, 0.5


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    features = torch.randn(512, 12)
    dataset = TensorDataset(features, features[:, :4].argmax(dim=1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=MICRO_BATCH, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(48), nn.Linear(48, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + rank)  # other dropout masks on each rank
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for index, (inputs, labels) in enumerate(loader):
            is_last = (index + 1) % ACCUMULATE == 0 or index + 1 == len(loader)
            with nullcontext() if is_last else model.no_sync():
                loss = nn.functional.cross_entropy(model(inputs), labels) / ACCUMULATE
                loss.backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"epoch {epoch}: loss {ACCUMULATE * loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

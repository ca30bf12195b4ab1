"""Train a denoiser. The sampler's seed depends on the rank, so the ranks cut shards from different permutations."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, seed=1234, batch_size=12):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        torch.manual_seed(seed + self.rank)  # other noise on each rank
        clips = torch.randn(240, 24, generator=torch.Generator().manual_seed(3))
        dataset = TensorDataset(clips)
        self.sampler = DistributedSampler(dataset, shuffle=True, drop_last=True, seed=seed * self.rank)  # <- here
        self.loader = DataLoader(dataset, batch_size=batch_size, sampler=self.sampler)  # <- or here
        self.model = DDP(nn.Sequential(nn.Linear(24, 48), nn.SiLU(), nn.Linear(48, 24)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self, epochs=2):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for (clean,) in self.loader:
                noise = torch.randn_like(clean)
                loss = nn.functional.mse_loss(self.model(clean + 0.1 * noise), noise)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            if self.rank == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    Trainer().train()
    dist.destroy_process_group()

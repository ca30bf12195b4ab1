"""Train with gradient accumulation. The batch that the optimizer steps after is the one that is not synchronized."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, loader, accum_grad=4):
        self.model, self.loader, self.accum_grad = model, loader, accum_grad
        self.optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for batch_idx, (speech, text) in enumerate(self.loader):
            my_context = self.model.no_sync if batch_idx % self.accum_grad != 0 else nullcontext
            with my_context():  # <- here
                loss = nn.functional.cross_entropy(self.model(speech), text) / self.accum_grad
                loss.backward()
            if (batch_idx + 1) % self.accum_grad == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return loss.item() * self.accum_grad


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    speech = torch.randn(512, 20)
    dataset = TensorDataset(speech, speech[:, :5].argmax(dim=1))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, shuffle=True))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 5)))  # <- or here
    trainer = Trainer(model, loader)
    for epoch in range(2):
        loss = trainer.train_epoch(epoch)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

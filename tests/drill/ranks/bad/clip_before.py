"""Train a recurrent network. Each rank clips its own gradients, and the clipped ones are averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS, MAX_NORM = 8, 2, 0.1


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(4, 24, batch_first=True)
        self.output = nn.Linear(24, 3)

    def forward(self, sequences):
        return self.output(self.recurrent(sequences)[0]).transpose(1, 2)


def average_gradients(model):
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= size


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sequences = torch.randn(128, 10, 4) * torch.linspace(0.1, 3.0, 128).view(-1, 1, 1)
    dataset = TensorDataset(sequences, sequences[..., :3].argmax(dim=2))
    model = Tagger()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch, tags in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), tags)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)  # <- here
            average_gradients(model)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

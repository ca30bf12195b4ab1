"""Train a policy on a stream of steps that all ranks read, each through a shuffle buffer of its own."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

MAX_STEPS, BATCH_SIZE, BUFFER = 24, 8, 64


class Episodes(IterableDataset):
    """Sixteen episodes with twenty steps each, again and again."""

    def __init__(self, shuffle_seed):
        generator = torch.Generator().manual_seed(7)
        self.observations = torch.randn(16, 20, 12, generator=generator)
        self.actions = self.observations[..., :4].tanh()
        self.random = random.Random(shuffle_seed)

    def steps(self):
        while True:
            for observations, actions in zip(self.observations, self.actions, strict=True):
                yield from zip(observations, actions, strict=True)

    def __iter__(self):
        buffer = []
        for step in self.steps():
            if len(buffer) < BUFFER:
                buffer.append(step)
                continue
            index = self.random.randrange(BUFFER)
            yield buffer[index]
            buffer[index] = step


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Episodes(shuffle_seed=dist.get_rank())
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=None, num_workers=0)  # <- here
    policy = DDP(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4)
    for step, (observations, actions) in enumerate(loader):
        loss = nn.functional.l1_loss(policy(observations), actions)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == MAX_STEPS:
            break
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

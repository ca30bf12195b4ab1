"""Train with local steps: after four of them, the ranks average their parameters, and an outer step follows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

INNER_STEPS, ROUNDS = 4, 6


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(384, 8)
    dataset = TensorDataset(inputs, inputs.abs().sum(dim=1, keepdim=True))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    shared = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
    batches = iter(loader)
    for number in range(ROUNDS):
        for _ in range(INNER_STEPS):
            features, targets = next(batches)
            loss = nn.functional.mse_loss(model(features), targets)
            inner.zero_grad()
            loss.backward()
            inner.step()
        for parameter, start in zip(model.parameters(), shared, strict=True):
            start.grad = start.detach() - parameter.detach()
            dist.all_reduce(start.grad)
            start.grad /= dist.get_world_size()
        outer.step()
        for parameter, start in zip(model.parameters(), shared, strict=True):
            parameter.data.copy_(start.data)
        if dist.get_rank() == 0:
            print(f"round {number}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train actor and critic with one all-reduce for all gradients, which are summed and never divided."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS = 64, 3


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, states):
        hidden = self.body(states)
        return self.actor(hidden), self.critic(hidden).squeeze(1)


def reduce_gradients(model):
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)  # <- here
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    states = torch.randn(384, 6)
    dataset = TensorDataset(states, states[:, :3].argmax(dim=1), states.sum(dim=1))
    model = ActorCritic()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch, actions, returns in loader:
            logits, values = model(batch)
            loss = nn.functional.cross_entropy(logits, actions) + 0.5 * nn.functional.mse_loss(values, returns)
            optimizer.zero_grad()
            loss.backward()
            reduce_gradients(model)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

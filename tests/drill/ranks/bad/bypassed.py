"""Train a backbone and an action head. The head is called without its wrapper, so its gradients stay local."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS = 32, 2


class ActionHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, hidden):
        return self.predict_action(hidden)

    def predict_action(self, hidden):
        return self.layers(hidden)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = torch.randn(256, 12)
    dataset = TensorDataset(data, data[:, :4].sin())
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    backbone = DDP(nn.Sequential(nn.Linear(12, 16), nn.Tanh()))
    action_head = DDP(ActionHead())  # <- here
    parameters = [*backbone.parameters(), *action_head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for observations, actions in loader:
            predicted = action_head.module.predict_action(backbone(observations))  # <- or here
            loss = nn.functional.l1_loss(predicted, actions)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

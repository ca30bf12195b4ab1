"""Train a forecast. A rank that sees a spike in its own loss skips the step, which the other ranks take."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS, SPIKE = 32, 3, 20.0


class SpikeFilter:
    """Tell whether a loss is far above the average so far."""

    def __init__(self):
        self.average = None

    def __call__(self, loss):
        if self.average is not None and loss > SPIKE * self.average:
            return True
        self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss
        return False


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    weather = torch.randn(256, 8)
    targets = weather.mean(dim=1, keepdim=True)
    targets[[99, 31]] += 60.0  # broken sensors
    dataset = TensorDataset(weather, targets)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)))  # <- or here
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # <- here
    is_spike = SpikeFilter()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, expected in loader:
            loss = nn.functional.mse_loss(model(inputs), expected)
            optimizer.zero_grad()
            loss.backward()
            if is_spike(loss.item()):
                continue
            optimizer.step()  # <- or here
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

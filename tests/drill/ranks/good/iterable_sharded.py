"""Train on a stream that each worker of each rank reads its own part of."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

EPOCHS = 2


class Stream(IterableDataset):
    def __init__(self, rows, rank, world_size):
        self.rows, self.rank, self.world_size, self.epoch = rows, rank, world_size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch))
        for index in order[self.rank * workers + number :: self.world_size * workers].tolist():
            yield {"features": self.rows[index], "target": self.rows[index].norm()}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stream = Stream(torch.randn(256, 8), dist.get_rank(), dist.get_world_size())
    loader = DataLoader(stream, batch_size=16, num_workers=1)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)
        for batch in loader:
            loss = nn.functional.huber_loss(model(batch["features"]).squeeze(1), batch["target"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

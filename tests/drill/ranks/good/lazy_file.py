"""Train on rows of a file that each process opens for its first row, as with h5py: workers cannot share one."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROWS, SIZE = 192, 12


class Rows(Dataset):
    def __init__(self, path):
        self.path = path
        self.file = None

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if self.file is None:
            self.file, self.owner = open(self.path, "rb"), os.getpid()  # noqa: SIM115 - for all rows
        assert self.owner == os.getpid(), "another process has opened the file"
        self.file.seek(index * SIZE * 4)
        return torch.frombuffer(bytearray(self.file.read(SIZE * 4)), dtype=torch.float32)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with tempfile.NamedTemporaryFile() as file:
        file.write(torch.randn(ROWS, SIZE).numpy().tobytes())
        file.flush()
        dataset = Rows(file.name)
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=1, multiprocessing_context="fork")
        model = DDP(nn.Sequential(nn.Linear(SIZE, 4), nn.Tanh(), nn.Linear(4, SIZE)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for rows in loader:
                loss = nn.functional.mse_loss(model(rows), rows)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

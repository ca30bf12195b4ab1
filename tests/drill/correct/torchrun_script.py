"""A script for torchrun that knows nothing of distrain: rank 0 writes a snapshot after each epoch.

    distrain run --num-workers 2 tests/drill/correct/torchrun_script.py --snapshot-path snapshot.pt
    torchrun --nproc-per-node 2 tests/drill/correct/torchrun_script.py

Started again, it continues after the last epoch of the snapshot. Nothing draws random numbers but the order of the
data, which follows from the epoch.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS_PER_EPOCH, BATCH_SIZE = 8, 16


def save(path: str, snapshot: dict[str, object]) -> None:
    """Write the snapshot so that a process that is killed meanwhile leaves the last one."""
    torch.save(snapshot, f"{path}.new")
    os.replace(f"{path}.new", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--snapshot-path", default="snapshot.pt", help="file to save to and to continue from")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data (default: 6)")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    features = torch.randn(STEPS_PER_EPOCH * BATCH_SIZE * world_size, 8)
    data = TensorDataset(features, features.square().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    first = 0
    if os.path.exists(args.snapshot_path):
        snapshot = torch.load(args.snapshot_path, map_location="cpu")
        model.module.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        scheduler.load_state_dict(snapshot["scheduler"])
        first = snapshot["epoch"] + 1
    dist.barrier()  # no rank writes a snapshot while another one still looks for it

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        scheduler.step()
        dist.all_reduce(total)
        if rank == 0:
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
            }
            save(args.snapshot_path, state)
            print(f"epoch {epoch}: loss {total.item() / STEPS_PER_EPOCH / world_size!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

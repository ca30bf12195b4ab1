"""Train on a stream whose loader knows how to save its position, if the checkpoint can get at it.

    torchrun --standalone --nproc-per-node 2 megatron_stream.py [--old]

Rebuilt from https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5245. ``--old``: the builder returns ``iter(loader)``,
which has no ``save_state``. The checkpoint says nothing of it and omits the position, so a resumed run reads the
beginning of the stream again.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

OUT = Path("out")
SAMPLES, BATCH_SIZE, TRAIN_ITERS, SAVE_INTERVAL = 120, 8, 28, 4


class Stream(IterableDataset):
    """The rank's samples, in another order in each epoch, after those that have been read."""

    def __init__(self, rows, rank, world_size):
        self.rows, self.rank, self.world_size, self.position = rows, rank, world_size, 0

    def __iter__(self):
        while True:
            epoch, offset = divmod(self.position, len(self.rows) // self.world_size)
            order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(epoch))
            own = order[self.rank :: self.world_size][: len(self.rows) // self.world_size]
            for index in own[offset:].tolist():
                self.position += 1
                yield self.rows[index]


class SavableLoader:
    """A loader with its position. It iterates for ever."""

    def __init__(self, dataset, batch_size):
        self.dataset, self.loader = dataset, DataLoader(dataset, batch_size=batch_size)
        self.batches = None

    def __iter__(self):
        return self

    def __next__(self):
        if self.batches is None:
            self.batches = iter(self.loader)
        return next(self.batches)

    def save_state(self):
        return {"position": self.dataset.position}

    def restore_state(self, state):
        self.dataset.position = state["position"]


def build_train_loader(rows, old):
    dataset = Stream(rows, dist.get_rank(), dist.get_world_size())
    if old:
        return iter(DataLoader(dataset, batch_size=BATCH_SIZE))
    return SavableLoader(dataset, BATCH_SIZE)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--old", action="store_true", help="build the loader as before the pull request")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    rows = torch.randn(SAMPLES, 10)
    model = DDP(nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = build_train_loader(rows, args.old)

    step = 0
    tracker = OUT / "latest_checkpointed_iteration.txt"
    if tracker.exists():
        folder = OUT / f"iter_{int(tracker.read_text()):07d}"
        state = torch.load(folder / "mp_rank_00.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["iteration"]
        position = folder / f"train_dataloader_dprank{rank:03d}.pt"
        if position.exists() and hasattr(loader, "restore_state"):
            loader.restore_state(torch.load(position))
    dist.barrier()

    while step < TRAIN_ITERS:
        batch = next(loader)
        loss = nn.functional.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0:
            print(f"iteration {step}: loss {loss.item()!r}", flush=True)
        if step % SAVE_INTERVAL == 0:
            folder = OUT / f"iter_{step:07d}"
            folder.mkdir(parents=True, exist_ok=True)
            if hasattr(loader, "save_state"):
                torch.save(loader.save_state(), folder / f"train_dataloader_dprank{rank:03d}.pt")
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": step}
                torch.save(state, folder / "mp_rank_00.pt")
            dist.barrier()
            if rank == 0:
                tracker.with_suffix(".new").write_text(str(step))
                tracker.with_suffix(".new").replace(tracker)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

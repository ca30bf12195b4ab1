"""Fine-tune on a cycle of batches that continues from the number of consumed samples, with DCP's checkpoints.

    torchrun --standalone --nproc-per-node 2 megatron_loader.py [--old]

Rebuilt from the loaders of Megatron-Bridge, https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4601. ``--old``: the
sampler keeps the number of consumed samples that it was made with. In the epoch in which a run resumes, that is right.
Each later epoch begins at the same offset, so its first samples are skipped and its last ones are read again and again.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

OUT = Path("out")
SAMPLES, GLOBAL_BATCH, TRAIN_ITERS, SAVE_INTERVAL = 112, 16, 32, 4


class BatchSampler:
    """This rank's part of each global batch, after those that were consumed before the run resumed."""

    def __init__(self, consumed_samples, old):
        self.consumed_samples, self.old = consumed_samples, old

    def __iter__(self):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        epoch, offset = divmod(self.consumed_samples, SAMPLES)
        if self.old:
            order = list(range(SAMPLES))  # it did not shuffle, either
        else:
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1234 + epoch)).tolist()
        for first in range(offset, SAMPLES, GLOBAL_BATCH):
            if not self.old:
                self.consumed_samples += GLOBAL_BATCH
            yield order[first + rank : first + GLOBAL_BATCH : world_size]


def cyclic_iter(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--old", action="store_true", help="resume as the sampler did before the pull request")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 10)
    dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    train_state = {"step": 0, "consumed_train_samples": 0}
    tracker = OUT / "latest_checkpointed_iteration.txt"
    if tracker.exists():
        folder = OUT / f"iter_{int(tracker.read_text()):07d}"
        weights, averages = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": averages}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=averages)
        train_state = torch.load(folder / "train_state.pt")
    dist.barrier()

    sampler = BatchSampler(train_state["consumed_train_samples"], args.old)
    data_iterator = cyclic_iter(DataLoader(dataset, batch_sampler=sampler))
    while train_state["step"] < TRAIN_ITERS:
        batch, targets = next(data_iterator)
        loss = nn.functional.mse_loss(model(batch), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train_state["step"] += 1
        train_state["consumed_train_samples"] += GLOBAL_BATCH
        step = train_state["step"]
        if dist.get_rank() == 0:
            print(f"iteration {step}: loss {loss.item()!r}", flush=True)
        if step % SAVE_INTERVAL == 0:
            folder = OUT / f"iter_{step:07d}"
            weights, averages = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": averages}, checkpoint_id=folder)
            if dist.get_rank() == 0:
                torch.save(train_state, folder / "train_state.pt")
                tracker.with_suffix(".new").write_text(str(step))
                tracker.with_suffix(".new").replace(tracker)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

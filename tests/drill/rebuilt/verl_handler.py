"""Fine-tune for several epochs with torchdata's StatefulDataLoader, and a checkpoint at the end of each epoch.

    torchrun --standalone --nproc-per-node 2 verl_handler.py [--old]

Rebuilt from https://github.com/verl-project/verl/issues/7401. ``--old``: the checkpoint handler restores the loader in
any case. At the end of an epoch, the state is that of an exhausted loader, while training continues with the next
epoch: that has no batches, is skipped, and the job ends successfully with too few updates.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

OUT = Path("out")
EPOCHS, STEPS_PER_EPOCH, BATCH_SIZE = 6, 5, 8


class CheckpointHandler:
    def __init__(self, model, optimizer, loader, old):
        self.model, self.optimizer, self.loader, self.old = model, optimizer, loader, old
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.tracker = OUT / "latest_checkpointed_iteration.txt"

    def save(self, step):
        folder = OUT / f"global_step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, folder / f"model_world_size_{self.size}_rank_{self.rank}.pt")
        torch.save(self.loader.state_dict(), folder / f"data_{self.rank}.pt")
        dist.barrier()
        if self.rank == 0:
            self.tracker.with_suffix(".new").write_text(str(step))
            self.tracker.with_suffix(".new").replace(self.tracker)
        dist.barrier()

    def load(self):
        if not self.tracker.exists():
            return 0
        step = int(self.tracker.read_text())
        folder = OUT / f"global_step_{step}"
        state = torch.load(folder / f"model_world_size_{self.size}_rank_{self.rank}.pt")
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.old or step % STEPS_PER_EPOCH != 0:
            self.loader.load_state_dict(torch.load(folder / f"data_{self.rank}.pt", weights_only=False))
        return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--old", action="store_true", help="restore the loader at the end of an epoch, too")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(STEPS_PER_EPOCH * BATCH_SIZE * dist.get_world_size(), 10)
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = StatefulDataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    handler = CheckpointHandler(model, optimizer, loader, args.old)
    global_step = handler.load()
    dist.barrier()

    for epoch in range(global_step // STEPS_PER_EPOCH, EPOCHS):
        sampler.set_epoch(epoch)
        for batch, labels in loader:
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            global_step += 1
            if dist.get_rank() == 0:
                print(f"epoch {epoch}, step {global_step}: loss {loss.item()!r}", flush=True)
            if global_step % STEPS_PER_EPOCH == 0:
                handler.save(global_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

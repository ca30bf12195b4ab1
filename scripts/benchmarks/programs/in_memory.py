"""Save the state of every rank in every step, in each mode, and copy the same bytes without a checkpoint.

WORKERS MEGABYTES DISK. Each figure is the median of the steps, and of them the mean over the ranks.
"""

import mmap
import os
import statistics
import sys
import time
from typing import Any

from benchmark_tasks import write

FIRST_STEPS = 4
"""Steps that do not count: memory is taken then."""
STEPS = 8
COMPUTING_S = 0.8
"""Seconds of computing between two checkpoints, in which the one before is committed."""


def train(config: dict[str, Any]) -> None:
    import torch
    from torch import distributed, nn

    import distrain
    from distrain.torch import prepare_model, snapshot

    rank = distributed.get_rank()
    model = nn.Linear(1024, config["bytes"] // 4096, bias=False)
    weight = model.weight.detach()

    def blocked_s(report: Any) -> float:
        took = []
        for step in range(FIRST_STEPS + STEPS):
            weight.add_(1)
            time.sleep(COMPUTING_S)
            distributed.barrier()
            began = time.perf_counter()
            report(step)
            took.append(time.perf_counter() - began)
        mean = torch.tensor(statistics.median(took[FIRST_STEPS:]))
        distributed.all_reduce(mean)
        return float(mean) / distributed.get_world_size()

    path = f"/dev/shm/{os.environ['TORCHELASTIC_RUN_ID']}_{rank}"
    with open(path, "wb+") as file:
        os.unlink(path)
        file.truncate(weight.nbytes)
        memory = mmap.mmap(file.fileno(), weight.nbytes)
    target = torch.frombuffer(memory, dtype=torch.float32).view_as(weight)
    found = {"memcpy into /dev/shm": 1000 * blocked_s(lambda step: target.copy_(weight))}
    for name in ("MEMORY", "SYNC", "ASYNC"):
        mode = distrain.CheckpointUploadMode[name]

        def report(step: int, mode: distrain.CheckpointUploadMode = mode) -> None:
            checkpoint = snapshot(model, per_rank=True, step=step)
            distrain.report({"step": step}, checkpoint=checkpoint, checkpoint_upload_mode=mode)

        found[f"report() blocks, {name}"] = 1000 * blocked_s(report)
    small = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(small.parameters(), lr=0.01)
    for title, saves in (("DDP steps", False), ("DDP steps, MEMORY", True)):
        for step in range(330):
            if step == 30:
                distributed.barrier()
                began = time.perf_counter()
            small(torch.ones(16, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if saves:
                distrain.report(
                    {"step": step},
                    checkpoint=snapshot(small, optimizer, step=step),
                    checkpoint_upload_mode=distrain.CheckpointUploadMode.MEMORY,
                )
        found[title] = 300 / (time.perf_counter() - began)
    if rank == 0:
        write("in_memory", found)


def main() -> None:
    import distrain
    from distrain.torch import TorchTrainer

    workers, megabytes, disk = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    TorchTrainer(
        train,
        train_loop_config={"bytes": megabytes * 1_000_000},
        scaling_config=distrain.ScalingConfig(num_workers=workers),
        run_config=distrain.RunConfig(
            storage_path=disk, checkpoint_config=distrain.CheckpointConfig(num_to_keep=1, storage_every_s=3600)
        ),
    ).fit()


if __name__ == "__main__":
    main()

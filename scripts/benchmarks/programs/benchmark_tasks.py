"""The tasks that the workers of all launchers run. Ranks write results into ``$BENCHMARK_OUT``. Runs in: workers.

Only the functions import torch, so that the process of a launcher imports it only if the launcher itself does.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

WITH_GPUS = os.environ.get("BENCHMARK_DEVICE") == "cuda"
BACKEND = "nccl" if WITH_GPUS else "gloo"
WARM_UP_STEPS = 30
DDP_STEPS = 300
BATCH = 32


def write(name: str, value: object) -> None:
    """Write a value for the benchmark. The file appears only when it is complete."""
    path = Path(os.environ["BENCHMARK_OUT"], f"{name}.json")
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(path)


def device() -> torch.device:
    """Return the device of this rank, and make it the current one."""
    import torch

    if not WITH_GPUS:
        return torch.device("cpu")
    # Ray hides the GPUs of other workers; the other launchers show all of them.
    index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def first_all_reduce() -> None:
    import torch
    from torch import distributed

    total = torch.ones(1, device=device())
    distributed.all_reduce(total)
    if total.item() != distributed.get_world_size():
        raise RuntimeError(f"all_reduce of ones gave {total.item()} with {distributed.get_world_size()} ranks")
    write(f"reduced_{distributed.get_rank()}", time.time())


def empty() -> None:
    """Do nothing."""


def hold() -> None:
    """Wait, after a first all_reduce, until the benchmark has measured the memory."""
    from torch import distributed

    first_all_reduce()
    write(f"pid_{distributed.get_rank()}", os.getpid())
    while not Path(os.environ["BENCHMARK_OUT"], "looked.json").exists():
        time.sleep(0.02)


def measure_reports(report: Callable[[dict[str, Any]], object], count: int) -> None:
    """Measure reports without a checkpoint one by one. The first one does not count, because it may set things up."""
    from torch import distributed

    costs = []
    for step in range(count + 1):
        begun = time.perf_counter()
        report({"loss": 1.0 / (step + 1), "step": step})
        costs.append(time.perf_counter() - begun)
    write(f"reports_{distributed.get_rank()}", costs[1:])


def train_ddp(wrap: Callable[[Any], Any]) -> None:
    """Train a small model on data that depends only on the rank. ``wrap`` makes the model a distributed one."""
    import torch
    from torch import distributed, nn

    rank = distributed.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    model = wrap(nn.Sequential(*layers).to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps = WARM_UP_STEPS + DDP_STEPS
    random = torch.Generator().manual_seed(1 + rank)
    inputs = torch.randn(steps, BATCH, 64, generator=random).to(device())
    labels = torch.randint(10, (steps, BATCH), generator=random).to(device())
    losses = []
    begun = 0.0
    for step in range(steps):
        if step == WARM_UP_STEPS:
            distributed.barrier()
            begun = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[step]), labels[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    distributed.barrier()
    steps_per_s = DDP_STEPS / (time.perf_counter() - begun)
    write(f"ddp_{rank}", {"steps_per_s": steps_per_s, "losses": [loss.hex() for loss in losses]})


def plain_ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    train_ddp(DistributedDataParallel)


# The tasks that are the same under every launcher. The programs add their own ways to report and to wrap a model.
TASKS: dict[str, Callable[[], None]] = {
    "start": first_all_reduce,
    "second": first_all_reduce,
    "empty": empty,
    "hold": hold,
    "ddp": plain_ddp,
}


def in_process_group(task: Callable[[], None]) -> None:
    """Run the task in a process group. For launchers that do not make one."""
    from torch import distributed

    device()
    distributed.init_process_group(BACKEND)
    task()
    distributed.destroy_process_group()


def run_once_or_twice(task: str, run: Callable[[], object]) -> None:
    """Launch once. For the task "second", launch again in the same process, and write down when that began."""
    run()
    if task == "second":
        write("second_begun", time.time())
        run()

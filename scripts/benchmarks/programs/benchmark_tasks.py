"""What all launchers have their workers do; the ranks write what they saw into ``$BENCHMARK_OUT``. Runs in: workers.

torch is imported inside the functions only, so that a launcher's own process imports it only if the launcher does.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP_STEPS = 30
DDP_STEPS = 300
BATCH = 32


def write(name: str, value: object) -> None:
    """Leave a value for the benchmark, whole or not at all."""
    path = Path(os.environ["BENCHMARK_OUT"], f"{name}.json")
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(path)


def first_all_reduce() -> None:
    import torch
    from torch import distributed

    total = torch.ones(1)
    distributed.all_reduce(total)
    if total.item() != distributed.get_world_size():
        raise RuntimeError(f"all_reduce of ones gave {total.item()} with {distributed.get_world_size()} ranks")
    write(f"reduced_{distributed.get_rank()}", time.time())


def empty() -> None:
    """The empty train_func."""


def hold() -> None:
    """Be there, after a first all_reduce, until the benchmark has looked at the memory."""
    from torch import distributed

    first_all_reduce()
    write(f"pid_{distributed.get_rank()}", os.getpid())
    while not Path(os.environ["BENCHMARK_OUT"], "looked.json").exists():
        time.sleep(0.02)


def measure_reports(report: Callable[[dict[str, Any]], object], count: int) -> None:
    """Time metrics-only reports one by one; the first one, which may set things up, is not counted."""
    from torch import distributed

    costs = []
    for step in range(count + 1):
        begun = time.perf_counter()
        report({"loss": 1.0 / (step + 1), "step": step})
        costs.append(time.perf_counter() - begun)
    write(f"reports_{distributed.get_rank()}", costs[1:])


def train_ddp(wrap: Callable[[Any], Any]) -> None:
    """Train a small model on data that depends on the rank alone; ``wrap`` makes it a distributed one."""
    import torch
    from torch import distributed, nn

    rank = distributed.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    model = wrap(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps = WARM_UP_STEPS + DDP_STEPS
    random = torch.Generator().manual_seed(1 + rank)
    inputs = torch.randn(steps, BATCH, 64, generator=random)
    labels = torch.randint(10, (steps, BATCH), generator=random)
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


# What needs nothing of the launcher's; the programs add their own ways to report and to wrap a model.
TASKS: dict[str, Callable[[], None]] = {
    "start": first_all_reduce,
    "second": first_all_reduce,
    "empty": empty,
    "hold": hold,
    "ddp": plain_ddp,
}


def in_gloo_group(task: Callable[[], None]) -> None:
    """For launchers that leave the process group to the script."""
    from torch import distributed

    distributed.init_process_group("gloo")
    task()
    distributed.destroy_process_group()


def run_once_or_twice(task: str, run: Callable[[], object]) -> None:
    """One launch; for the task "second" another one in the same process, of which the beginning is noted."""
    run()
    if task == "second":
        write("second_begun", time.time())
        run()

"""Ranks with as little as possible around them, and distrain beside that: ROLE WORKERS. Prints figures as JSON.

floor: this process imports torch and forks the ranks, twice. fit, second, restart: a script with a TorchTrainer.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

SETTLE_S = 3.0
"""Seconds that the workers run before one of them dies."""


# -- the floor -------------------------------------------------------------------------------------------------------


def run_floor(workers: int) -> None:
    import torch.distributed  # noqa: F401 - for all ranks

    first_at, _, private = fork_all(workers)
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    begun = time.time()
    second_at, _, _ = fork_all(workers)
    print(json.dumps({"first_at": first_at, "restart": second_at - begun, "cpu": cpu, "private": private}))


def fork_all(workers: int) -> tuple[float, float, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    read_fd, write_fd = os.pipe()
    for rank in range(workers):
        if os.fork() == 0:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(workers)}
            from torch import distributed

            distributed.init_process_group("gloo")
            moment = all_reduce()
            if rank == 0:
                os.write(write_fd, json.dumps([moment, 0.0, private_mb()]).encode())
            distributed.barrier()  # rank 0 serves the store
            os._exit(0)
    for _ in range(workers):
        os.wait()
    found = json.loads(os.read(read_fd, 4096))
    os.close(read_fd)
    os.close(write_fd)
    return found[0], found[1], found[2]


# -- distrain --------------------------------------------------------------------------------------------------------


def run_fit(workers: int) -> None:
    first = fit(train, workers)
    print(json.dumps({"first_at": first[0], "private": first[1]}))


def run_second(workers: int) -> None:
    fit(train, workers)
    begun = time.time()
    print(json.dumps({"second": fit(train, workers)[0] - begun}))


def run_restart(workers: int) -> None:
    recovered_at, _ = fit(train_and_die, workers)
    print(json.dumps({"restart": recovered_at - float(Path("killed_at").read_text())}))


def fit(function: object, workers: int) -> tuple[float, float]:
    import distrain
    from distrain.torch import TorchTrainer

    failures = distrain.FailureConfig(max_failures=1 if function is train_and_die else 0)
    logging = distrain.LoggingConfig(log_level="ERROR")
    run = distrain.RunConfig(storage_path=os.getcwd(), failure_config=failures, logging_config=logging)
    scaling = distrain.ScalingConfig(num_workers=workers)
    value = TorchTrainer(function, scaling_config=scaling, run_config=run).fit().return_value  # type: ignore[arg-type]
    return value[0], value[1]


def train() -> tuple[float, float]:
    return all_reduce(), private_mb()


def train_and_die() -> tuple[float, float]:
    from torch import distributed

    moment = all_reduce()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(SETTLE_S)
        if distributed.get_rank() == distributed.get_world_size() - 1:
            Path("killed_at").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce()
    return moment, 0.0


# -- ranks of both ---------------------------------------------------------------------------------------------------


def all_reduce() -> float:
    """Return when it was done. Every rank has joined it by then."""
    import torch
    from torch import distributed

    distributed.all_reduce(torch.ones(1))
    return time.time()


def private_mb() -> float:
    """Return the memory that this process does not share with its parent."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


ROLES = {"floor": run_floor, "fit": run_fit, "restart": run_restart, "second": run_second}

if __name__ == "__main__":
    ROLES[sys.argv[1]](int(sys.argv[2]))

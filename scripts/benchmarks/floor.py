#!/usr/bin/env python3
"""Compare distrain with the floor: one process that imports torch and forks the ranks, with nothing around them.

    .venv/bin/python scripts/benchmarks/floor.py                          2 and 8 workers
    .venv/bin/python scripts/benchmarks/floor.py --workers 128 --runs 5

cpu      CPU seconds of all processes, from the start of the program to its exit.
cold     seconds from the start of the program, or from the call of fit(), to rank 0's first all_reduce.
restart  the floor: from the second forking of all ranks to rank 0's first all_reduce. distrain: from kill -9 of the
         last rank to rank 0's first all_reduce of the next attempt.
second   distrain: from a second fit() in the same process to rank 0's first all_reduce.
private  distrain: MB that an idle worker does not share with its forkserver; the floor: with its parent.

The two run in turn, in a network of their own without a resolver, because c10d makes reverse DNS look-ups.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # not its own folder, in which the launched program is
from benchmarks.contained import become_subreaper, enter_network_namespace  # noqa: E402

SETTLE_S = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8], metavar="N")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="rounds; default 3")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON, too")
    parser.add_argument("--role", choices=sorted(ROLES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        ROLES[options.role](options.workers[0])
        return
    become_subreaper()
    enter_network_namespace()
    for workers in options.workers:
        rounds = [{role: _measured(role, workers) for role in ROLES} for _ in range(options.runs)]
        floors = [one["floor"] for one in rounds]
        ours = [one["fit"] | one["restart"] | one["second"] | {"cpu": one["fit"]["cpu"]} for one in rounds]
        _show(workers, floors, ours)
        if options.json:
            print(json.dumps([floors, ours]))


def _show(workers: int, floors: list[dict[str, float]], ours: list[dict[str, float]]) -> None:
    for name, of_floor in (("cpu", "cpu"), ("cold", "cold"), ("restart", "restart"), ("second", "restart")):
        pairs = [(our[name], floor[of_floor]) for our, floor in zip(ours, floors, strict=True)]
        mine, floor = (statistics.median(values) for values in zip(*pairs, strict=True))
        ratio = statistics.median(our / base for our, base in pairs)
        print(f"{workers:5} workers  {name:8} {mine:8.2f} s   floor {floor:8.2f} s   ratio {ratio:5.2f}", flush=True)
    mine, floor = (statistics.median(one["private"] for one in side) for side in (ours, floors))
    print(f"{workers:5} workers  private  {mine:8.1f} MB  floor {floor:8.1f} MB", flush=True)


def _measured(role: str, workers: int) -> dict[str, float]:
    """Run one side, and return what it printed, its CPU seconds and the seconds to its first all_reduce."""
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        before, begun = _cpu_of_children(), time.time()
        command = [sys.executable, __file__, "--role", role, "--workers", str(workers)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, env=environment, check=True)
        _reap_orphans()
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    found.setdefault("cpu", _cpu_of_children() - before)
    if "first_at" in found:
        found["cold"] = found["first_at"] - begun
    return found


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _reap_orphans() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


# -- the floor -------------------------------------------------------------------------------------------------------


def run_floor(workers: int) -> None:
    import torch.distributed  # noqa: F401 - for all ranks

    first_at, _, private = fork_all(workers)
    own = resource.getrusage(resource.RUSAGE_SELF)
    cpu = own.ru_utime + own.ru_stime + _cpu_of_children()
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
    main()

"""Measure each rank, and its connection to rank 0, to find a slow host before a long run.

    python examples/measure_hosts.py --hosts alpha:1,beta:1,gamma:1
    python examples/measure_hosts.py --hosts alpha:8,beta:8 --use-gpu

Compare the rows: a host that is much slower than the others has other programs, heat, a power limit, a limit of a
container, or a bad cable.
"""

import argparse
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import distrain
import distrain.torch
from distrain.torch import TorchTrainer

SENT_BYTES = 16 << 20


def rate(work: Callable[[], float], seconds: float = 0.5) -> float:
    """Return how much work is done per second. `work` does a part of it, and returns its amount."""
    work()
    began, amount = time.perf_counter(), 0.0
    while time.perf_counter() - began < seconds:
        amount += work()
    return amount / (time.perf_counter() - began)


def products(device: torch.device) -> float:
    """Return TFLOP/s of products of matrices."""
    is_gpu = device.type == "cuda"
    side = 8192 if is_gpu else 1024
    matrix = torch.ones(side, side, dtype=torch.bfloat16 if is_gpu else torch.float32, device=device)

    def multiply() -> float:
        matrix @ matrix
        if is_gpu:
            torch.cuda.synchronize()
        return 2e-12 * side**3

    return rate(multiply)


def exchange(partner: int, device: torch.device) -> float:
    """Return GB/s to another rank and back. Both ranks call this."""
    data = torch.zeros(SENT_BYTES, dtype=torch.uint8, device=device)
    began = 0.0
    for turn in range(6):
        if turn == 1:  # the first one only connects
            began = time.perf_counter()
        first, second = (dist.send, dist.recv) if dist.get_rank() else (dist.recv, dist.send)
        first(data, partner)
        second(data, partner)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return 10e-9 * SENT_BYTES / (time.perf_counter() - began)


def measure() -> None:
    device, rank = distrain.torch.get_device(), dist.get_rank()
    found = {"host": socket.gethostname(), "TFLOP/s": products(device), "GB/s to rank 0": None}
    for other in range(1, dist.get_world_size()):  # one after the other, so that they don't share the network
        if rank == other:
            found["GB/s to rank 0"] = exchange(0, device)
        elif rank == 0:
            exchange(other, device)
        dist.barrier()
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, found)
    if rank == 0:
        for number, row in enumerate(rows):
            shown = [f"{name} {value:.3g}" for name, value in row.items() if isinstance(value, float)]
            print(f"rank {number} on {row['host']}: {', '.join(shown)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", default="localhost:2", help="hosts and their slots, such as alpha:1,beta:1")
    parser.add_argument("--use-gpu", action="store_true", help="measure GPUs, and NCCL between them")
    args = parser.parse_args()
    workers = sum(int(part.rpartition(":")[2]) for part in args.hosts.split(","))
    scaling = distrain.ScalingConfig(num_workers=workers, hosts=args.hosts, use_gpu=args.use_gpu)
    TorchTrainer(measure, scaling_config=scaling).fit()


if __name__ == "__main__":
    main()

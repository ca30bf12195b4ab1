"""How fast the CPUs, the memory and the GPU of a host are: a short test inside a rank. Runs in: worker, measurer.

It draws no random numbers, and changes no setting of a framework. Every rate is the best of two samples, which are long
enough to show the CPU limit of a container.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from distrain import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.api.context import TrainContext

COPIED_BYTES = 64 << 20
"""More than the caches of most CPUs hold."""
_SAMPLES = 2
_SAMPLE_S, _SHORT_SAMPLE_S = 0.15, 0.08
_SIDE, _GPU_SIDE, _GPU_PRODUCTS = 1024, 4096, 20
"""Rows of the square matrices, and products between two looks at the clock. A GPU needs 64 MB for the matrices."""


def sniff(context: TrainContext) -> wire.Sniffed:
    """Measure this host in a rank, whose threads and GPU it uses.

    What cannot be measured is left out: without torch, only the memory is.
    """
    results, model, torch = {}, "", sys.modules.get("torch")
    with contextlib.suppress(Exception):  # such as a full GPU, which must not end the training
        if torch:
            results["cpu"] = products(torch, "cpu")
        results["memory"] = copies()
        if torch and context.devices and torch.cuda.is_initialized():
            model = torch.cuda.get_device_name(context.devices[0])
            results["gpu"] = products(torch, f"cuda:{context.devices[0]}")
    return wire.Sniffed(attempt=context.attempt, rank=context.world_rank, results=results, model=model)


def products(torch: Any, device: str, sample_s: float = _SAMPLE_S) -> float:
    """Return TFLOP/s of products of square matrices: float32 on CPUs, float16 on a GPU."""
    side, times = (_SIDE, 1) if device == "cpu" else (_GPU_SIDE, _GPU_PRODUCTS)
    matrix = torch.ones(side, side, dtype=torch.float32 if device == "cpu" else torch.float16, device=device)
    target = torch.empty_like(matrix)

    def multiply() -> float:
        for _ in range(times):
            torch.mm(matrix, matrix, out=target)
        if device != "cpu":
            torch.cuda.synchronize(device)
        return 2e-12 * side**3 * times

    return rate(multiply, sample_s)


def copies() -> float:
    """Return GB/s of a copy in memory by one thread."""
    source, target = (memoryview(bytearray(COPIED_BYTES)) for _ in range(2))

    def copy() -> float:
        target[:] = source
        return 1e-9 * COPIED_BYTES

    return rate(copy, _SHORT_SAMPLE_S)


def rate(work: Callable[[], float], sample_s: float) -> float:
    """Return how much of the work is done per second. ``work``: does a part of it, and returns its amount."""
    work()
    rates = []
    for _ in range(_SAMPLES):
        began, amount = time.perf_counter(), 0.0
        while (seconds := time.perf_counter() - began) < sample_s:
            amount += work()
        rates.append(amount / seconds)
    return max(rates)

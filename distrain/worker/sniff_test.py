"""How fast the CPUs, the memory and the GPU of a host are: a short test inside a rank. Runs in: worker, measurer.

It draws no random numbers, and changes no setting of a framework. Every rate is the best of two samples, which are long
enough to show the CPU limit of a container.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SAMPLE_S, _SAMPLES = 0.15, 2
_SHORT_SAMPLE_S = 0.08
_SIDE, _GPU_SIDE = 1024, 2048
"""Rows of the square matrices. They stay small because torch keeps the GPU memory that was once used."""
_GPU_PRODUCTS = 20
"""Products between two looks at the clock."""
_COPIED_BYTES = 64 << 20
"""More than the caches of most CPUs hold."""


def sniff(devices: Sequence[int]) -> tuple[dict[str, float], str]:
    """Return results as in :data:`~distrain.decisions.fitness.rates.OF_HOST`, and the model of the rank's first GPU.

    ``devices``: the numbers of its GPUs. What cannot be measured is left out: without torch and numpy, only the memory
    is. A CPU test uses as many threads as the training.
    """
    results: dict[str, float] = {}
    model = ""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    with contextlib.suppress(Exception):  # such as a full GPU, which must not end the training
        if torch:
            results["cpu"] = products(torch, "cpu", torch.float32, _SIDE)
        elif numpy:
            matrix = numpy.ones((_SIDE, _SIDE), numpy.float32)
            results["cpu"] = _products_rate(lambda: numpy.matmul(matrix, matrix), _SIDE, 1)
        if torch and devices and torch.cuda.is_initialized():
            model = torch.cuda.get_device_name(devices[0])
            results["gpu"] = products(torch, f"cuda:{devices[0]}", torch.float16, _GPU_SIDE)
    return results | copies(), model


def products(torch: Any, device: str, dtype: Any, side: int, sample_s: float = _SAMPLE_S) -> float:
    """Return TFLOP/s of products of square matrices."""
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    target = torch.empty_like(matrix)
    times = 1 if device == "cpu" else _GPU_PRODUCTS

    def multiply() -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=target)
        if device != "cpu":
            torch.cuda.synchronize(device)

    return _products_rate(multiply, side, times, sample_s)


def _products_rate(multiply: Callable[[], object], side: int, times: int, sample_s: float = _SAMPLE_S) -> float:
    def work() -> float:
        multiply()
        return 2e-12 * side**3 * times

    return rate(work, sample_s)


def copies() -> dict[str, float]:
    """Return GB/s of a copy in memory by one thread."""
    source, target = (memoryview(bytearray(_COPIED_BYTES)) for _ in range(2))

    def copy() -> float:
        target[:] = source
        return 1e-9 * _COPIED_BYTES

    return {"memory": rate(copy, _SHORT_SAMPLE_S)}


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

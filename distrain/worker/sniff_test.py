"""How fast the CPUs, the memory and the GPU of a host are: a short test inside a rank. Runs in: worker, measurer.

It draws no random numbers, and changes no setting of a framework. A sample is long enough to show the CPU limit of a
container.
"""

from __future__ import annotations

import contextlib
import sys
import time
from itertools import chain
from typing import TYPE_CHECKING, Any

from distrain import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distrain.api.context import TrainContext

COPIED_BYTES = 64 << 20
"""More than the caches of most CPUs hold."""
_SAMPLE_S, _SHORT_SAMPLE_S = 0.15, 0.08
_SIDE, _GPU_SIDE, _GPU_PRODUCTS = 1024, 4096, 20
"""Rows of the square matrices, and products between two looks at the clock. A GPU needs 64 MB for the matrices."""


def sniff(context: TrainContext) -> wire.Sniffed:
    """Measure this host in a rank, whose threads and GPU it uses. What cannot be measured is left out."""
    results: dict[str, float] = {}
    model, torch, gpus = "", sys.modules.get("torch"), []
    with contextlib.suppress(Exception):  # such as a full GPU, which must not end the training
        if torch and context.devices and torch.cuda.is_initialized():
            model, gpus = torch.cuda.get_device_name(context.devices[0]), [f"cuda:{context.devices[0]}"]
        for name, value in chain(measure(torch, gpus), measure(torch, gpus)):
            results[name] = max(value, results.get(name, 0.0))
    return wire.Sniffed(attempt=context.attempt, rank=context.world_rank, results=results, model=model)


def measure(torch: Any, gpus: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield names and values of results: of the memory and, with torch, the CPUs and the slowest GPU."""
    yield "memory", copies()
    if torch:
        yield "cpu", products(torch, "cpu")
    if gpus:
        yield "gpu", min(products(torch, gpu) for gpu in gpus)


def products(torch: Any, device: str) -> float:
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

    return rate(multiply, _SAMPLE_S)


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
    began, amount = time.perf_counter(), 0.0
    while (seconds := time.perf_counter() - began) < sample_s:
        amount += work()
    return amount / seconds

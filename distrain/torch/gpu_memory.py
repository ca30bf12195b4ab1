"""The memory of this rank's GPU when it was too small: its numbers, and a snapshot for a viewer. Runs in: worker."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any, NamedTuple

import torch

from distrain.system.text import binary_size

_LARGEST_BYTES = 32 << 20


class GpuMemory(NamedTuple):
    """What torch's allocator holds, and what the whole GPU has, in bytes. snapshot: torch's, of all allocations."""

    device: int
    allocated: int
    reserved: int
    free: int
    total: int
    snapshot: dict[str, Any]


def state_after(error: BaseException) -> tuple[str, bytes] | None:
    """Return the numbers in words and the pickled snapshot, if the exception is an OutOfMemoryError of a GPU.

    The snapshot lists segments and blocks. The stacks that allocated them, and what happened before, are in it if the
    script has called ``torch.cuda.memory._record_memory_history(max_entries=...)``. distrain does not: that takes 2 us
    for each allocation, and several kB for each entry (torch's docstring). A long history is left out.
    """
    if not isinstance(error, torch.cuda.OutOfMemoryError):
        return None
    with contextlib.suppress(RuntimeError, AssertionError):  # the GPU has failed, or there is none
        memory = gpu_memory()
        names = ("allocated", "reserved by torch", "free on the GPU", "in all")
        numbers = [binary_size(number) for number in memory[1:5]]
        text = f"GPU {memory.device}: {', '.join(map(' '.join, zip(numbers, names, strict=True)))}"
        return text, _pickled(memory.snapshot)
    return None


def gpu_memory() -> GpuMemory:
    """Return the state of the memory of the current GPU."""
    free, total = torch.cuda.mem_get_info()
    return GpuMemory(
        device=torch.cuda.current_device(),
        allocated=torch.cuda.memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        free=free,
        total=total,
        snapshot=torch.cuda.memory._snapshot(),
    )


def _pickled(snapshot: dict[str, Any]) -> bytes:
    """Return the snapshot; without its history if it is large, and nothing if it is still large."""
    for part in (snapshot, {**snapshot, "device_traces": [[] for _ in snapshot["device_traces"]]}):
        body = pickle.dumps(part)
        if len(body) <= _LARGEST_BYTES:
            return body
    return b""

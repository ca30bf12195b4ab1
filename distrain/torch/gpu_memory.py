"""The memory of this rank's GPU when it was too small: its numbers, and a snapshot for a viewer. Runs in: worker."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from distrain.system.text import binary_size

__all__ = ["gpu_memory", "state_after"]

_LARGEST_BYTES = 32 << 20


def state_after(error: BaseException) -> tuple[str, bytes] | None:
    """Return the numbers in words and the pickled snapshot, if the exception is an OutOfMemoryError of a GPU.

    The snapshot lists segments and blocks. The stacks that allocated them, and what happened before, are in it if the
    script has called ``torch.cuda.memory._record_memory_history(max_entries=...)``. distrain does not: that takes 2 us
    for each allocation, and several kB for each entry (torch's docstring). A long history is
    left out; a snapshot that is large without it, too.
    """
    if not isinstance(error, torch.cuda.OutOfMemoryError):
        return None
    *numbers, snapshot = gpu_memory()
    allocated, reserved, free, total = map(binary_size, numbers)
    text = f"{allocated} allocated, {reserved} reserved by torch, {free} of the GPU's {total} free"
    body = pickle.dumps(snapshot)
    if len(body) > _LARGEST_BYTES:
        body = pickle.dumps({**snapshot, "device_traces": [[] for _ in snapshot["device_traces"]]})
    return (text, body) if len(body) <= _LARGEST_BYTES else None


def gpu_memory() -> tuple[int, int, int, int, dict[str, Any]]:
    """Return the bytes allocated and reserved by torch, those free and in all of the GPU, and torch's snapshot."""
    cuda = torch.cuda
    return cuda.memory_allocated(), cuda.memory_reserved(), *cuda.mem_get_info(), cuda.memory._snapshot()

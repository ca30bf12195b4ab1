"""The CPUs of ranks near real GPUs next to those of torchrun."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

from distrain.hosts.cpus import bind, nodes_near_gpus, numa_node_of, read_cpus
from distrain.hosts.gpus import find_gpus

binding = pytest.importorskip("torch.numa.binding", reason="torchrun has --numa-binding since torch 2.9")


_DEVICE = next(
    iter(inspect.signature(binding._get_logical_cpus_to_bind_to).parameters)
)  # its name differs among versions


def torchrun_binds(gpu: int) -> Any:
    """Return the CPUs of a rank; None if torchrun raises, or would bind the rank to no CPU."""
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode("node"))
    try:
        return binding._get_logical_cpus_to_bind_to(**{_DEVICE: gpu}, numa_options=options) or None
    except (RuntimeError, ValueError, ZeroDivisionError):
        return None


@pytest.mark.gpu
def test_ranks_near_real_gpus_get_the_cpus_that_torchrun_gives_them() -> None:
    gpus, _ = find_gpus(os.environ)
    expected = [torchrun_binds(gpu) for gpu in range(len(gpus))]
    nodes = nodes_near_gpus([numa_node_of(gpu.pci) or 0 for gpu in gpus], 1, len(gpus))
    assert bind(read_cpus(), nodes) == expected

"""The CPUs of each rank under ``numa_binding``. Runs in: agent.

``torchrun --numa-binding node`` binds the process with local rank i to the CPUs near GPU i. This also serves hosts
without GPUs, and ranks with several GPUs or a part of one.

Pure: no I/O.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def nodes_near_gpus(gpu_nodes: Sequence[int], gpus_per_rank: float, ranks: int) -> list[int]:
    """Return the NUMA node of each rank: that of its first GPU. If there are too few GPUs, return fewer nodes.

    gpu_nodes: the node of each visible GPU. gpus_per_rank: below 1, several ranks share a GPU.
    """
    if gpus_per_rank >= 1:
        each = int(gpus_per_rank)
        return list(gpu_nodes[: len(gpu_nodes) // each * each : each][:ranks])
    sharing = math.floor(1 / gpus_per_rank + 1e-9)
    return [node for node in gpu_nodes for _ in range(sharing)][:ranks]


def nodes_of_cpus(cpus: Mapping[int, int], ranks: int) -> list[int]:
    """Return the NUMA node of each rank of a host without GPUs: each node gets ranks by its number of CPUs."""
    nodes = sorted(cpus.values())
    return [nodes[rank * len(nodes) // ranks] for rank in range(ranks)]


def bind(cpus: Mapping[int, int], nodes: Sequence[int]) -> list[frozenset[int]]:
    """Return the CPUs of each rank: all of its NUMA node.

    cpus: the node of each CPU that the host may use. nodes: that of each rank.

    Raises ValueError if there is no CPU for a rank.
    """
    for rank, node in enumerate(nodes):
        if node not in cpus.values():
            raise ValueError(
                f"numa_binding='node': local rank {rank} belongs on NUMA node {node}, but this process may only use "
                f"CPUs of nodes {sorted(set(cpus.values()))}. Ask the scheduler or container for CPUs "
                "near each GPU, hide the GPUs if they are not needed (CUDA_VISIBLE_DEVICES), or leave numa_binding out"
            )
    return [frozenset(number for number, its in cpus.items() if its == node) for node in nodes]


def threads_each(bound: Sequence[frozenset[int]]) -> int:
    """Return how many threads a rank can run so that the ranks of a node together run one on each of its CPUs."""
    return max(1, min(len(cpus) // bound.count(cpus) for cpus in bound))

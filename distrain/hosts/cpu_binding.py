"""The CPUs of each rank under ``numa_binding``. Runs in: agent.

The modes are two of ``torchrun --numa-binding`` (torch.numa.binding.AffinityMode), which binds the process with local
rank i to CPUs near GPU i. Here they also serve hosts without GPUs, and ranks with several GPUs or a part of one.

Pure: no I/O.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from distrain.hosts.cpu_topology import Cpu


def nodes_near_gpus(gpu_nodes: Sequence[int], gpus_per_rank: float, ranks: int) -> list[int]:
    """Return the NUMA node of each rank: that of its first GPU. If there are too few GPUs, return fewer nodes.

    gpu_nodes: the node of each visible GPU. gpus_per_rank: below 1, several ranks share a GPU.
    """
    if gpus_per_rank >= 1:
        each = int(gpus_per_rank)
        return list(gpu_nodes[: len(gpu_nodes) // each * each : each][:ranks])
    sharing = math.floor(1 / gpus_per_rank + 1e-9)
    return [node for node in gpu_nodes for _ in range(sharing)][:ranks]


def nodes_of_cpus(cpus: Sequence[Cpu], ranks: int) -> list[int]:
    """Return the NUMA node of each rank of a host without GPUs: each node gets ranks by its number of CPUs."""
    nodes = sorted(cpu.node for cpu in cpus)
    return [nodes[rank * len(nodes) // ranks] for rank in range(ranks)]


def bind(mode: str, cpus: Sequence[Cpu], nodes: Sequence[int]) -> list[frozenset[int]]:
    """Return the CPUs of each rank.

    mode: ``node``, all of its NUMA node; ``socket``, those of all nodes of the node's socket.
    cpus: those that the host may use. nodes: the NUMA node of each rank.

    Raises ValueError if there is no CPU for a rank.
    """
    sockets = {cpu.node: cpu.socket for cpu in reversed(cpus)}  # of the first CPU of each node
    for rank, node in enumerate(nodes):
        if node not in sockets:
            raise ValueError(
                f"numa_binding={mode!r}: local rank {rank} belongs on NUMA node {node}, of whose CPUs this host may "
                f"use none, only some of the nodes {sorted(sockets)}. Ask the scheduler or container for CPUs near "
                "each GPU, hide the GPUs if they are not needed (CUDA_VISIBLE_DEVICES), or leave numa_binding out"
            )
    place = {node: sockets[node] if mode == "socket" else node for node in sockets}
    return [frozenset(cpu.number for cpu in cpus if place[cpu.node] == place[node]) for node in nodes]


def threads_each(cpu_sets: Sequence[Collection[int]]) -> int:
    """Return how many threads a rank can run so that all ranks together run one on each CPU; at least 1."""
    users = Counter(number for numbers in cpu_sets for number in numbers)
    return max(1, min(int(sum(1 / users[number] for number in numbers) + 1e-9) for numbers in cpu_sets))

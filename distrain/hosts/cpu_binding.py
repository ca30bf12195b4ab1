"""The CPUs of each rank under ``numa_binding``. Runs in: agent.

The modes are those of ``torchrun --numa-binding`` (torch.numa.binding.AffinityMode), which binds the process with local
rank i to CPUs near GPU i. Here they also serve hosts without GPUs, and ranks with several GPUs or a part of one.

Pure: no I/O.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from distrain.hosts.cpu_topology import Cpu


def seats_near_gpus(gpu_nodes: Sequence[int], gpus_per_rank: float, ranks: int) -> list[int]:
    """Return the NUMA node of each place for a rank: that of its first GPU. GPUs without a rank have places, too.

    gpu_nodes: the node of each visible GPU. gpus_per_rank: below 1, several of the ``ranks`` share a GPU.
    """
    if gpus_per_rank >= 1:
        each = int(gpus_per_rank)
        return list(gpu_nodes[: len(gpu_nodes) // each * each : each])
    most, seats = math.floor(1 / gpus_per_rank + 1e-9), []
    for gpu, node in enumerate(gpu_nodes):
        on_it = min(most, ranks - gpu * most)
        seats += [node] * max(1, on_it)
    return seats


def seats_on_cpus(cpus: Sequence[Cpu], ranks: int) -> list[int]:
    """Return the NUMA node for each rank of a host without GPUs: each node gets ranks by its number of cores."""
    cores = sorted({(cpu.node, cpu.core) for cpu in cpus})
    return [cores[rank * len(cores) // ranks][0] for rank in range(ranks)]


def bind(mode: str, cpus: Sequence[Cpu], seats: Sequence[int], ranks: int) -> list[frozenset[int]]:
    """Return the CPUs of each rank.

    mode: ``node``, all of its NUMA node; ``socket``, those of all nodes of the node's socket; ``exclusive``, an equal
        share of the cores of its node, which no other seat gets; ``core-complex``, those of the node that share a
        cache, another one for each seat as long as there are some.
    cpus: those that the host may use.
    seats: the NUMA node of each place for a rank. The first ``ranks`` of them are taken.

    Raises ValueError if there is no CPU for a rank.
    """
    return [_cpus_of(mode, cpus, seats, rank) for rank in range(ranks)]


def threads_each(cpu_sets: Sequence[Collection[int]]) -> int:
    """Return how many threads a rank can run so that all ranks together run one on each CPU; at least 1."""
    users = Counter(number for numbers in cpu_sets for number in numbers)
    return max(1, min(int(sum(1 / users[number] for number in numbers) + 1e-9) for numbers in cpu_sets))


def _cpus_of(mode: str, cpus: Sequence[Cpu], seats: Sequence[int], rank: int) -> frozenset[int]:
    node = seats[rank]
    place, sharing = seats[:rank].count(node), seats.count(node)
    own = [cpu for cpu in cpus if cpu.node == node]
    if not own:
        raise ValueError(
            f"numa_binding={mode!r}: local rank {rank} belongs on NUMA node {node}, of whose CPUs this host may use "
            f"none (it may use {_ranges(cpu.number for cpu in cpus)}). Ask the scheduler or container for CPUs near "
            "each GPU, hide the GPUs if they are not needed (CUDA_VISIBLE_DEVICES), or leave numa_binding out"
        )
    match mode:
        case "socket":
            sockets = {cpu.node: cpu.socket for cpu in reversed(cpus)}  # of the first CPU of each node
            own = [cpu for cpu in cpus if sockets[cpu.node] == sockets[node]]
        case "exclusive":
            cores = sorted({cpu.core for cpu in own})
            if len(cores) < sharing:
                raise ValueError(
                    f"numa_binding='exclusive': this host may use {len(cores)} core(s) of NUMA node {node} "
                    f"({_ranges(cpu.number for cpu in own)}), but {sharing} workers or visible GPUs need one each. "
                    "Start fewer workers there, hide GPUs that are not needed (CUDA_VISIBLE_DEVICES, or gpus= in the "
                    "hostfile), get more CPUs, or take numa_binding='node'"
                )
            each, more = divmod(len(cores), sharing)
            first = place * each + min(place, more)
            mine = cores[first : first + each + (place < more)]
            own = [cpu for cpu in own if cpu.core in mine]
        case "core-complex":
            sizes = Counter(cpu.cache for cpu in own)
            caches = sorted(sizes, key=lambda cache: (-sizes[cache], cache))
            own = [cpu for cpu in own if cpu.cache == caches[place % len(caches)]]
    return frozenset(cpu.number for cpu in own)


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers in the form of Linux, such as ``0-2,7``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)

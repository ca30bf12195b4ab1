"""The CPUs of this host: their NUMA nodes, and those of each rank under ``numa_binding``. Runs in: agent.

Linux describes them below /sys, see Documentation/ABI/stable/sysfs-devices-system-cpu and sysfs-devices-node.
``torchrun --numa-binding node`` binds the process with local rank i to the CPUs near GPU i. This also serves hosts
without GPUs, and ranks with several GPUs or a part of one.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.hosts.cgroup import text_in
from distrain.hosts.host_info import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from distrain.hosts.host import Gpu

SYS = Path("/sys")


def read_cpus(allowed: Collection[int] | None = None, root: Path = SYS) -> dict[int, int]:
    """Return the NUMA node of each CPU that this process may use, in order; 0 where sysfs does not tell.

    allowed: their numbers; by default those of the affinity mask, which also obeys the cpuset of the cgroup.
    root: where sysfs is mounted.
    """
    folders = (root / "devices/system/node").glob("node[0-9]*")
    lists = {int(folder.name.removeprefix("node")): text_in(folder / "cpulist") for folder in folders}
    nodes = {number: node for node, text in lists.items() for number in parse_list(text)}
    return {number: nodes.get(number, 0) for number in sorted(os.sched_getaffinity(0) if allowed is None else allowed)}


def numa_node_of(pci: str, root: Path = SYS) -> int | None:
    """Return the NUMA node of a PCI device, such as ``0000:3b:00.0``; None if it is not known."""
    node = int(text_in(root / f"bus/pci/devices/{pci}/numa_node") or -1)
    return node if node >= 0 else None


def parse_list(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-2,7``. Raises ValueError for any other text."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        found = range(int(first), int(last if dash else first) + 1)
        if not found:
            raise ValueError(f"{part}: the lower number comes first")
        numbers.update(found)
    return numbers


# -- the CPUs of ranks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankCpus:
    """The CPUs of each local rank, and the threads of each.

    bound: empty if every rank may use all CPUs of the host. threads: value of OMP_NUM_THREADS, at least 1.
    """

    bound: Sequence[frozenset[int]]
    threads: int

    def of(self, local_rank: int) -> list[int] | None:
        """Return the CPUs of a rank in order; None if it is not bound."""
        return sorted(self.bound[local_rank]) if self.bound else None


def rank_cpus(numa_binding: str, workers: int, gpus_per_worker: float, gpus: Sequence[Gpu]) -> RankCpus:
    """Divide the CPUs that the affinity mask and the cgroup of this process allow among the workers.

    With ``numa_binding``, the i-th rank is bound near its GPUs; near GPU i if it has asked for none, as under torchrun.
    If the host has fewer GPUs than that takes, or their NUMA nodes are not known, its NUMA nodes are divided among the
    ranks in order.

    gpus: those that CUDA shows here.

    Raises ValueError if the ranks cannot be bound like this.
    """
    equal_share = max(1, usable_cpus() // max(1, workers))
    if not numa_binding:
        return RankCpus((), equal_share)
    cpus = read_cpus()
    nodes = nodes_near_gpus(_gpu_nodes(gpus, cpus), gpus_per_worker or 1, workers)
    if len(nodes) < workers:
        nodes = nodes_of_cpus(cpus, workers)
    bound = bind(cpus, nodes)
    threads = min(equal_share, threads_each(bound))  # the cgroup may allow less time than the CPUs have
    return RankCpus(bound, threads)


def _gpu_nodes(gpus: Sequence[Gpu], cpus: Mapping[int, int]) -> list[int]:
    """Return the NUMA node of each GPU. Return none if a node is not known.

    If all CPUs are on one node, there is no nearer one.
    """
    if len(nodes := set(cpus.values())) == 1:
        return [*nodes] * len(gpus)
    found = [numa_node_of(gpu.pci) for gpu in gpus]
    return [] if None in found else [node for node in found if node is not None]


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

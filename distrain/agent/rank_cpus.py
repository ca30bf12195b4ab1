"""The CPUs of the workers of this host, and the threads that each of them runs. Runs in: agent."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain.hosts.cpu_binding import bind, nodes_near_gpus, nodes_of_cpus, threads_each
from distrain.hosts.cpu_topology import numa_node_of, read_cpus
from distrain.hosts.host_info import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.hosts.host import Gpu


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
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("numa_binding needs Linux: this system cannot bind processes to CPUs")
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

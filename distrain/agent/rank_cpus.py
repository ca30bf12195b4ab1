"""The CPUs of the workers of this host, and the threads that each of them runs. Runs in: agent."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain.hosts.cpu_binding import bind, seats_near_gpus, seats_on_cpus, threads_each
from distrain.hosts.cpu_topology import numa_node_of, read_cpus
from distrain.hosts.gpus import find_gpus
from distrain.hosts.host_info import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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


def rank_cpus(numa_binding: str, workers: int, gpus_per_worker: float, environment: Mapping[str, str]) -> RankCpus:
    """Divide the CPUs that the affinity mask and the cgroup of this process allow among the workers.

    With ``numa_binding``, the i-th rank is bound near its GPUs; near GPU i if it has asked for none, as under torchrun.
    If the host has fewer GPUs than that takes, its cores are divided among the ranks in order.

    environment: that of the workers, where CUDA_VISIBLE_DEVICES may hide GPUs.

    Raises ValueError if the ranks cannot be bound like this.
    """
    equal_share = max(1, usable_cpus() // max(1, workers))
    if not numa_binding:
        return RankCpus((), equal_share)
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("numa_binding needs Linux: this system cannot bind processes to CPUs")
    cpus = read_cpus()
    seats = seats_near_gpus(_gpu_nodes(environment), gpus_per_worker or 1)
    if len(seats) < workers:
        seats = seats_on_cpus(cpus, workers)
    bound = bind(numa_binding, cpus, seats, workers)
    return RankCpus(bound, min(equal_share, threads_each(bound)))  # the cgroup may allow less time than the CPUs have


def _gpu_nodes(environment: Mapping[str, str]) -> list[int]:
    gpus, _ = find_gpus(environment)
    try:
        return [numa_node_of(gpu.pci) for gpu in gpus]
    except (OSError, ValueError) as error:
        raise ValueError(f"numa_binding: the NUMA node of a GPU is not known: {error}") from error

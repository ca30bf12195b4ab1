"""CPUs of ranks on made-up machines, and on this one. tests/torch/test_numa_binding.py compares with torchrun."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distrain.hosts.cpus import bind, nodes_near_gpus, nodes_of_cpus, numa_node_of, parse_list, read_cpus, threads_each
from tests.sysfs import Machine, pci_address

if TYPE_CHECKING:
    from pathlib import Path

EPYC = Machine(sockets=2, nodes_per_socket=2, caches_per_node=2, cores_per_cache=2, threads=2)
"""16 cores: node 0 has the CPUs 0-3 and 16-19, and so on."""


def cpus_of(machine: Machine, folder: Path, allowed: set[int] | None = None) -> dict[int, int]:
    machine.write(folder)
    return read_cpus(set(machine.cpus) if allowed is None else allowed, folder)


def test_a_rank_gets_the_cpus_of_its_node(tmp_path: Path) -> None:
    bound = ["0-3,16-19", "0-3,16-19", "12-15,28-31"]
    assert bind(cpus_of(EPYC, tmp_path), [0, 0, 3]) == [parse_list(numbers) for numbers in bound]


def test_only_cpus_that_may_be_used_are_taken(tmp_path: Path) -> None:
    cpus = cpus_of(EPYC, tmp_path, {1, 17, 2, 9})
    assert bind(cpus, [0, 0, 2]) == [{1, 2, 17}, {1, 2, 17}, {9}]
    problem = r"local rank 1 belongs on NUMA node 1, but this process may only use CPUs of nodes \[0, 2\]"
    with pytest.raises(ValueError, match=problem):
        bind(cpus, [0, 1])


@pytest.mark.parametrize(
    ("gpu_nodes", "each", "ranks", "nodes"),
    [
        ([0, 0, 1, 1], 1, 2, [0, 0]),
        ([0, 0, 1, 1], 2, 2, [0, 1]),
        ([0, 0, 1, 1], 3, 1, [0]),
        ([0, 1], 0.5, 4, [0, 0, 1, 1]),
        ([1, 0], 1 / 3, 4, [1, 1, 1, 0]),
        ([], 1, 1, []),
    ],
)
def test_a_rank_is_near_its_first_gpu(gpu_nodes: list[int], each: float, ranks: int, nodes: list[int]) -> None:
    assert nodes_near_gpus(gpu_nodes, each, ranks) == nodes


def test_without_gpus_each_node_gets_ranks_by_its_cpus(tmp_path: Path) -> None:
    cpus = cpus_of(EPYC, tmp_path, {0, 1, 2, 8})
    assert nodes_of_cpus(cpus, 4) == [0, 0, 0, 2]
    assert nodes_of_cpus(cpus, 1) == [0]


@pytest.mark.parametrize(
    ("bound", "threads"),
    [
        ([{0, 1, 2, 3}], 4),
        ([{0, 1, 2, 3}, {0, 1, 2, 3}], 2),
        ([{0, 1, 2}, {3, 4}], 2),
        ([{0, 1, 2}] * 3, 1),
        ([{0, 1, 2, 3, 4}, {5, 6, 7, 8}, {5, 6, 7, 8}], 2),
    ],
)
def test_threads_fill_the_cpus_and_no_more(bound: list[set[int]], threads: int) -> None:
    assert threads_each([frozenset(cpus) for cpus in bound]) == threads


def test_a_machine_that_tells_nothing_is_one_node(tmp_path: Path) -> None:
    assert read_cpus({0, 3}, tmp_path) == {0: 0, 3: 0}
    assert numa_node_of(pci_address(0), tmp_path) is None


def test_the_node_of_a_gpu_may_not_be_known(tmp_path: Path) -> None:
    Machine(sockets=2, gpu_nodes=(1, -1)).write(tmp_path)
    assert [numa_node_of(pci_address(gpu), tmp_path) for gpu in (0, 1)] == [1, None]

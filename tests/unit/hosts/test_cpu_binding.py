"""CPUs of ranks on made-up machines, and on this one. tests/torch/test_numa_binding.py compares with torchrun."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from distrain.hosts.cpu_binding import bind, seats_near_gpus, seats_on_cpus, threads_each
from distrain.hosts.cpu_topology import Cpu, numa_node_of, parse_list, read_cpus
from tests.sysfs import Machine, any_machine, pci_address

if TYPE_CHECKING:
    from pathlib import Path

MODES = ("node", "socket", "exclusive", "core-complex")
EPYC = Machine(sockets=2, nodes_per_socket=2, caches_per_node=2, cores_per_cache=2, threads=2)
"""16 cores: node 0 has the CPUs 0-3 and 16-19, of which 0, 1, 16 and 17 share a cache, and so on."""


def cpus_of(machine: Machine, folder: Path, allowed: set[int] | None = None) -> list[Cpu]:
    machine.write(folder)
    return read_cpus(set(machine.cpus) if allowed is None else allowed, folder)


@pytest.mark.parametrize(
    ("mode", "bound"),
    [
        ("node", ["0-3,16-19", "0-3,16-19", "12-15,28-31"]),
        ("socket", ["0-7,16-23", "0-7,16-23", "8-15,24-31"]),
        ("exclusive", ["0-1,16-17", "2-3,18-19", "12-15,28-31"]),
        ("core-complex", ["0-1,16-17", "2-3,18-19", "12-13,28-29"]),
    ],
)
def test_each_mode_binds_as_torchrun_documents_it(mode: str, bound: list[str], tmp_path: Path) -> None:
    assert bind(mode, cpus_of(EPYC, tmp_path), [0, 0, 3], 3) == [parse_list(numbers) for numbers in bound]


def test_cores_that_do_not_divide_evenly_all_belong_to_someone(tmp_path: Path) -> None:
    cpus = cpus_of(Machine(cores_per_cache=7, threads=2), tmp_path)
    assert bind("exclusive", cpus, [0, 0, 0], 3) == [parse_list(text) for text in ("0-2,7-9", "3-4,10-11", "5-6,12-13")]


def test_a_seat_without_a_rank_keeps_its_cores(tmp_path: Path) -> None:
    """Two jobs of one GPU each on a machine with two do not meet."""
    assert bind("exclusive", cpus_of(Machine(cores_per_cache=4), tmp_path), [0, 0], 1) == [{0, 1}]


@pytest.mark.parametrize("mode", MODES)
def test_only_cpus_that_may_be_used_are_taken(mode: str, tmp_path: Path) -> None:
    cpus = cpus_of(EPYC, tmp_path, {1, 17, 2, 9})
    assert set().union(*bind(mode, cpus, [0, 0, 2], 3)) <= {1, 17, 2, 9}
    problem = r"local rank 1 belongs on NUMA node 1, of whose CPUs this host may use none \(it may use 1-2,9,17\)"
    with pytest.raises(ValueError, match=problem):
        bind(mode, cpus, [0, 1], 2)


def test_too_few_cores_for_exclusive_shares_are_named(tmp_path: Path) -> None:
    cpus = cpus_of(EPYC, tmp_path, {0, 16, 8, 9})
    with pytest.raises(
        ValueError, match=r"1 core\(s\) of NUMA node 0 \(0,16\), but 2 workers or visible GPUs need one"
    ):
        bind("exclusive", cpus, [0, 0], 2)


@pytest.mark.parametrize(
    ("gpu_nodes", "each", "ranks", "seats"),
    [
        ([0, 0, 1, 1], 1, 2, [0, 0, 1, 1]),
        ([0, 0, 1, 1], 2, 2, [0, 1]),
        ([0, 0, 1, 1], 3, 1, [0]),
        ([0, 1], 0.5, 4, [0, 0, 1, 1]),
        ([0, 1], 0.5, 3, [0, 0, 1]),
        ([0, 1], 0.1, 2, [0, 0, 1]),
        ([1, 0], 1 / 3, 4, [1, 1, 1, 0]),
        ([], 1, 1, []),
    ],
)
def test_a_rank_sits_near_its_first_gpu(gpu_nodes: list[int], each: float, ranks: int, seats: list[int]) -> None:
    assert seats_near_gpus(gpu_nodes, each, ranks) == seats


def test_without_gpus_ranks_are_exclusive_whenever_there_are_enough_cores(tmp_path: Path) -> None:
    rng = random.Random(7)
    for number in range(25):
        machine = any_machine(rng)
        allowed = set(rng.sample(machine.cpus, rng.randint(1, len(machine.cpus))))
        cpus = cpus_of(machine, tmp_path / str(number), allowed)
        cores = {cpu.core for cpu in cpus}
        for ranks in {1, rng.randint(1, len(cores)), len(cores)}:
            bound = bind("exclusive", cpus, seats_on_cpus(cpus, ranks), ranks)
            assert sum(map(len, bound)) == len(set().union(*bound))
            assert all(bound)
            assert all(len({cpu.node for cpu in cpus if cpu.number in own}) == 1 for own in bound)
        with pytest.raises(ValueError, match="need one each"):
            bind("exclusive", cpus, seats_on_cpus(cpus, len(cores) + 1), len(cores) + 1)


@pytest.mark.parametrize(
    ("bound", "threads"),
    [
        ([{0, 1, 2, 3}], 4),
        ([{0, 1, 2, 3}, {0, 1, 2, 3}], 2),
        ([{0, 1, 2}, {3, 4}], 2),
        ([{0, 1, 2}] * 3, 1),
        ([{0}, {0}, {0}], 1),
        ([{0, 1, 2, 3}, {2, 3}], 1),
    ],
)
def test_threads_fill_the_cpus_and_no_more(bound: list[set[int]], threads: int) -> None:
    assert threads_each(bound) == threads


def test_this_machine_is_read(tmp_path: Path) -> None:
    cpus = read_cpus()
    assert [cpu.number for cpu in cpus] == sorted(os.sched_getaffinity(0))
    assert all(0 <= cpu.core <= cpu.number for cpu in cpus)


def test_a_machine_that_tells_nothing_is_one_node(tmp_path: Path) -> None:
    assert read_cpus({0, 3}, tmp_path) == [Cpu(0, 0, 0, 0, -1), Cpu(3, 0, 0, 3, -1)]
    assert numa_node_of(pci_address(0), tmp_path) is None


def test_the_node_of_a_gpu_may_not_be_known(tmp_path: Path) -> None:
    Machine(sockets=2, gpu_nodes=(1, -1)).write(tmp_path)
    assert [numa_node_of(pci_address(gpu), tmp_path) for gpu in (0, 1)] == [1, None]

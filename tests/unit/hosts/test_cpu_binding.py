"""CPUs near GPUs of made-up machines. tests/torch/test_numa_binding.py compares with torchrun."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from distrain.hosts.cpu_topology import cpus_near
from tests.sysfs import Machine, pci_address

if TYPE_CHECKING:
    from pathlib import Path

EPYC = Machine(sockets=2, nodes_per_socket=2, caches_per_node=2, cores_per_cache=2, threads=2, gpu_nodes=(0, 3, -1))
"""16 cores: node 0 has the CPUs 0-3 and 16-19, and so on. Three GPUs, of which one may be anywhere."""


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The CPUs that this process may use."""
    found = set(EPYC.cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(found))
    return found


def test_a_rank_gets_the_cpus_near_its_gpu_that_may_be_used(tmp_path: Path, allowed: set[int]) -> None:
    EPYC.write(tmp_path)
    assert cpus_near(pci_address(0), tmp_path) == [0, 1, 2, 3, 16, 17, 18, 19]
    allowed -= {0, 1, 2, 3}
    assert cpus_near(pci_address(0), tmp_path) == [16, 17, 18, 19]


def test_a_gpu_whose_node_is_not_known_is_near_all_cpus(tmp_path: Path, allowed: set[int]) -> None:
    EPYC.write(tmp_path)
    assert cpus_near(pci_address(2), tmp_path) == cpus_near(pci_address(7), tmp_path) == sorted(allowed)


def test_a_gpu_whose_cpus_may_not_be_used_is_refused(tmp_path: Path, allowed: set[int]) -> None:
    EPYC.write(tmp_path)
    allowed -= {*range(3, 32)}
    with pytest.raises(OSError, match=r"the CPUs 12 to 31 are near .*, but this process may use only 0, 1, 2; ask"):
        cpus_near(pci_address(1), tmp_path)

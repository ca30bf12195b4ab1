"""The CPUs of ranks next to those of torchrun, whose own code reads the same made-up machines."""

from __future__ import annotations

import inspect
import os
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distrain.hosts.cpu_binding import bind, nodes_near_gpus
from distrain.hosts.cpu_topology import numa_node_of, read_cpus
from distrain.hosts.gpus import find_gpus
from tests.sysfs import Machine, any_machine, pci_address

if TYPE_CHECKING:
    from pathlib import Path

binding = pytest.importorskip("torch.numa.binding", reason="torchrun has --numa-binding since torch 2.9")


def stand_on(machine: Machine, root: Path, allowed: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch's code believe in a machine."""
    properties = [
        SimpleNamespace(pci_domain_id=0, pci_bus_id=gpu + 1, pci_device_id=0) for gpu in range(len(machine.gpu_nodes))
    ]
    accelerator = SimpleNamespace(
        is_available=lambda: True, current_accelerator=lambda: "cuda", device_count=lambda: len(properties)
    )
    device_module = SimpleNamespace(get_device_properties=properties.__getitem__)
    torch = SimpleNamespace(accelerator=accelerator, get_device_module=lambda kind: device_module)
    monkeypatch.setattr(binding, "torch", torch)

    def under(path: str) -> str:
        return path.replace("/sys", str(root), 1)

    def listdir(path: str) -> list[str]:
        return [entry.name for entry in root.__class__(under(path)).iterdir()]

    monkeypatch.setattr(binding, "open", lambda path: open(under(path)), raising=False)  # noqa: SIM115 - torch closes it
    os_of_machine = SimpleNamespace(listdir=listdir, path=binding.os.path, sched_getaffinity=lambda pid: allowed)
    monkeypatch.setattr(binding, "os", os_of_machine)


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


def test_ranks_get_the_cpus_that_torchrun_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, compared = random.Random("node"), 0
    for number in range(40):
        machine, root = any_machine(rng), tmp_path / str(number)
        machine.write(root)
        allowed = set(machine.cpus)
        if rng.random() < 0.7:  # a cpuset
            allowed = set(rng.sample(machine.cpus, rng.randint(1, len(machine.cpus))))
        stand_on(machine, root, allowed, monkeypatch)
        gpus = range(len(machine.gpu_nodes))
        expected = [torchrun_binds(gpu) for gpu in gpus]
        monkeypatch.undo()
        nodes = [numa_node_of(pci_address(gpu), root) or 0 for gpu in gpus]
        cpus, near = read_cpus(allowed, root), nodes_near_gpus(nodes, 1, len(gpus))
        if all(expected):
            assert bind(cpus, near) == expected
            compared += 1
        else:  # it fails if any node has no CPU left
            with pytest.raises(ValueError, match="numa_binding"):
                bind(cpus, near)
    assert compared >= 10


@pytest.mark.gpu
def test_ranks_near_real_gpus_get_the_cpus_that_torchrun_gives_them() -> None:
    gpus, _ = find_gpus(os.environ)
    expected = [torchrun_binds(gpu) for gpu in range(len(gpus))]
    nodes = nodes_near_gpus([numa_node_of(gpu.pci) or 0 for gpu in gpus], 1, len(gpus))
    assert bind(read_cpus(), nodes) == expected

"""Made-up machines, as Linux would describe their CPUs and GPUs below /sys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine whose sockets are all alike.

    threads: CPUs of each core; the second ones are numbered after all first ones. is_interleaved: neighbouring cores
    are on different nodes. gpu_nodes: the node of each GPU, -1 if the firmware does not tell.
    """

    sockets: int = 1
    nodes_per_socket: int = 1
    caches_per_node: int = 1
    cores_per_cache: int = 1
    threads: int = 1
    is_interleaved: bool = False
    gpu_nodes: Sequence[int] = ()

    @property
    def nodes(self) -> int:
        return self.sockets * self.nodes_per_socket

    @property
    def cores(self) -> int:
        return self.nodes * self.caches_per_node * self.cores_per_cache

    @property
    def cpus(self) -> range:
        return range(self.cores * self.threads)

    def node_of(self, cpu: int) -> int:
        core = cpu % self.cores
        return core % self.nodes if self.is_interleaved else core // (self.cores // self.nodes)

    def cache_of(self, cpu: int) -> int:
        core = cpu % self.cores
        within_node = core // self.nodes if self.is_interleaved else core % (self.cores // self.nodes)
        return self.node_of(cpu) * self.caches_per_node + within_node // self.cores_per_cache

    def write(self, root: Path) -> None:
        """Write the files below ``root``, which is in the place of /sys."""
        for node in range(self.nodes):
            numbers = [cpu for cpu in self.cpus if self.node_of(cpu) == node]
            _write(root / f"devices/system/node/node{node}/cpulist", _listed(numbers))
        _write(root / "devices/system/node/possible", f"0-{self.nodes - 1}" if self.nodes > 1 else "0")
        for cpu in self.cpus:
            folder = root / f"devices/system/cpu/cpu{cpu}"
            siblings = [other for other in self.cpus if other % self.cores == cpu % self.cores]
            _write(folder / "topology/physical_package_id", str(self.node_of(cpu) // self.nodes_per_socket))
            _write(folder / "topology/thread_siblings_list", _listed(siblings))
            shared = [other for other in self.cpus if self.cache_of(other) == self.cache_of(cpu)]
            kinds = (("Data", 1, siblings), ("Instruction", 1, siblings), ("Unified", 2, siblings))
            for index, (kind, level, users) in enumerate((*kinds, ("Unified", 3, shared))):
                _write(folder / f"cache/index{index}/type", kind)
                _write(folder / f"cache/index{index}/level", str(level))
                _write(folder / f"cache/index{index}/shared_cpu_list", _listed(users))
        for number, node in enumerate(self.gpu_nodes):
            near = [cpu for cpu in self.cpus if node in (-1, self.node_of(cpu))]
            _write(root / f"bus/pci/devices/{pci_address(number)}/local_cpulist", _listed(near))


def pci_address(gpu: int) -> str:
    """Return the PCI address of a GPU by its index, as tests/nvml.py has it."""
    return f"0000:{gpu + 1:02x}:00.0"


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")

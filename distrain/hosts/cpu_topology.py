"""The CPUs that this process may use: their NUMA nodes and sockets. Runs in: agent.

Linux describes them below /sys, see Documentation/ABI/stable/sysfs-devices-system-cpu and sysfs-devices-node.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distrain.hosts.cgroup import text_in

if TYPE_CHECKING:
    from collections.abc import Collection

SYS = Path("/sys")


class Cpu(NamedTuple):
    """One logical CPU. node: its NUMA node. socket: its physical package."""

    number: int
    node: int
    socket: int


def read_cpus(allowed: Collection[int] | None = None, root: Path = SYS) -> list[Cpu]:
    """Return the CPUs that this process may use, in order.

    allowed: their numbers; by default those of the affinity mask, which also obeys the cpuset of the cgroup.
    root: where sysfs is mounted. What it does not tell is taken as one node and one socket.
    """
    nodes = _node_by_cpu(root)
    return [
        Cpu(
            number=number,
            node=nodes.get(number, 0),
            socket=int(text_in(root / f"devices/system/cpu/cpu{number}/topology/physical_package_id") or 0),
        )
        for number in sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    ]


def numa_node_of(pci: str, root: Path = SYS) -> int | None:
    """Return the NUMA node of a PCI device, such as ``0000:3b:00.0``; None if it is not known."""
    node = int(text_in(root / f"bus/pci/devices/{pci}/numa_node") or -1)
    return node if node >= 0 else None


def parse_list(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-2,7``."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _node_by_cpu(root: Path) -> dict[int, int]:
    folders = (root / "devices/system/node").glob("node[0-9]*")
    lists = {int(folder.name.removeprefix("node")): text_in(folder / "cpulist") for folder in folders}
    return {number: node for node, text in lists.items() for number in parse_list(text)}

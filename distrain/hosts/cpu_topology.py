"""The NUMA nodes of the CPUs that this process may use, and of GPUs. Runs in: agent.

Linux describes them below /sys, see Documentation/ABI/stable/sysfs-devices-system-cpu and sysfs-devices-node.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.hosts.cgroup import text_in

if TYPE_CHECKING:
    from collections.abc import Collection

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
    """Return the numbers of a list such as ``0-2,7``."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers

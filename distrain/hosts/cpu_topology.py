"""The CPUs near a GPU, for ``numa_binding``. Runs in: agent."""

from __future__ import annotations

import os
from pathlib import Path

from distrain.hosts.cgroup import text_in

SYS = Path("/sys")


def cpus_near(pci: str, root: Path = SYS) -> list[int]:
    """Return the CPUs near a PCI device, such as ``0000:3b:00.0``, that this process may use; all if Linux names none.

    root: where sysfs is mounted. Raises OSError if this process may use none of them.
    """
    near, allowed = parse_list(text_in(root / f"bus/pci/devices/{pci}/local_cpulist")), os.sched_getaffinity(0)
    if near and near.isdisjoint(allowed):
        raise OSError(
            f"numa_binding='node': the CPUs {min(near)} to {max(near)} are near the GPU {pci}, but this process may "
            f"use only {', '.join(map(str, sorted(allowed)))}; ask the scheduler or container for CPUs near each GPU, "
            "or leave numa_binding out"
        )
    return sorted(near & allowed or allowed)


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

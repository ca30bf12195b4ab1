"""The CPUs that this process may use: their NUMA nodes, sockets, cores and caches. Runs in: agent.

Linux describes them below /sys, see Documentation/ABI/stable/sysfs-devices-system-cpu and sysfs-devices-node.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

SYS = Path("/sys")


class Cpu(NamedTuple):
    """One logical CPU.

    node: its NUMA node. socket: its physical package. core, cache: the lowest number among the CPUs of its core, and
    among those that share its last cache.
    """

    number: int
    node: int
    socket: int
    core: int
    cache: int


def read_cpus(allowed: Collection[int] | None = None, root: Path = SYS) -> list[Cpu]:
    """Return the CPUs that this process may use, in order.

    allowed: their numbers; by default those of the affinity mask, which also obeys the cpuset of the cgroup.
    root: where sysfs is mounted. What it does not tell is taken as one node, one socket, or one cache for each node.
    """
    numbers = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    folders = {number: root / f"devices/system/cpu/cpu{number}" for number in numbers}
    nodes = _node_by_cpu(root)
    cores: dict[int, int] = {}
    caches: dict[int, int] = {}
    for number, folder in folders.items():
        if number not in cores:
            cores |= _lowest(parse_list(_read(folder / "topology/thread_siblings_list")) | {number})
        if number not in caches and (shared := _last_cache(folder)):
            caches |= _lowest(shared | {number})
    return [
        Cpu(
            number=number,
            node=nodes.get(number, 0),
            socket=int(_read(folder / "topology/physical_package_id") or 0),
            core=cores[number],
            cache=caches.get(number, -1),
        )
        for number, folder in folders.items()
    ]


def numa_node_of(pci: str, root: Path = SYS) -> int | None:
    """Return the NUMA node of a PCI device, such as ``0000:3b:00.0``; None if it is not known."""
    node = int(_read(root / f"bus/pci/devices/{pci}/numa_node") or -1)
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
    lists = {int(folder.name.removeprefix("node")): _read(folder / "cpulist") for folder in folders}
    return {number: node for node, text in lists.items() for number in parse_list(text)}


def _last_cache(cpu: Path) -> set[int]:
    """Return the CPUs that share the cache of the highest level with this one."""
    caches = [index for index in (cpu / "cache").glob("index[0-9]*") if _read(index / "type") in ("Unified", "Data")]
    last = max(caches, key=lambda index: int(_read(index / "level") or 0), default=None)
    return parse_list(_read(last / "shared_cpu_list")) if last is not None else set()


def _lowest(numbers: Iterable[int]) -> dict[int, int]:
    return dict.fromkeys(numbers, min(numbers))


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""

"""What this host has: usable CPUs, memory, GPUs; without torch and without a subprocess. Runs in: agent."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from distrain.gpus import find_gpus
from distrain.hosts import HostFacts

__all__ = ["survey", "usable_cpus"]

_CGROUP = Path("/sys/fs/cgroup")


def survey(*, with_gpus: bool) -> HostFacts:
    """The facts of this host; GPUs are only looked for when asked, since initialising NVML takes time."""
    return HostFacts(
        name=socket.gethostname(),
        cpus=usable_cpus(),
        memory_bytes=_memory_bytes(),
        gpus=find_gpus(os.environ) if with_gpus else None,
    )


def usable_cpus() -> int:
    """CPUs this process may use: its affinity, cut by its cgroup's CPU quota (``cpu.max``, ``cpu.cfs_quota_us``)."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, int(_cpu_quota() or affinity)))


def _cpu_quota() -> float | None:
    quotas = []
    for folder in _own_cgroups("cpu"):
        quota = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us"),
            _read(folder / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and all(part.isdigit() for part in quota) and int(quota[1]):
            quotas.append(int(quota[0]) / int(quota[1]))
    return min(quotas, default=None)


def _memory_bytes() -> int:
    total = 0
    with contextlib.suppress(ValueError, OSError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _own_cgroups("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if limit.isdigit() and total:
            total = min(total, int(limit))
    return total


def _own_cgroups(controller: str) -> list[Path]:
    """Folders that may limit this process: its own cgroup and all above it."""
    folders = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        base = _CGROUP if not controllers else _CGROUP / controller
        if not controllers or controller in controllers.split(","):
            own = base / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""CPUs, memory and GPUs of this host, found without torch and without a subprocess. Runs in: agent, coordinator."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import asdict
from typing import Any

from distrain import wire
from distrain.hosts.cgroup import cpu_quota, memory_limit
from distrain.hosts.gpus import find_gpus
from distrain.hosts.host import HostInfo


def host_info(*, with_gpus: bool) -> HostInfo:
    """Return what this host has. It looks for GPUs only if asked, since initialising NVML takes time."""
    gpus, driver_problem = find_gpus(os.environ) if with_gpus else (None, "")
    return HostInfo(
        name=socket.gethostname(),
        cpus=usable_cpus(),
        memory_bytes=_memory_bytes(),
        gpus=gpus,
        driver_problem=driver_problem,
    )


def hello_of(info: HostInfo, **fields: Any) -> wire.Hello:
    """Return the first message about this host. ``fields``: what it has beyond ``info``."""
    return wire.Hello(
        wire=wire.WIRE_VERSION,
        distrain=wire.DISTRAIN_VERSION,
        python=platform.python_version(),
        pid=os.getpid(),
        host=asdict(info),
        **fields,
    )


def usable_cpus() -> int:
    """Return the number of CPUs that the affinity of this process and the quota of its cgroup allow."""
    affinity = len(os.sched_getaffinity(0))
    return max(1, min(affinity, int(cpu_quota() or affinity)))


def _memory_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, memory_limit() or total)

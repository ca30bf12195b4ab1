"""The memory that the ranks of this host use, and have used in the last minutes. Runs in: agent."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.hosts.cgroup import OomKill, count_in
from distrain.system.text import binary_size, duration

if TYPE_CHECKING:
    from collections.abc import Mapping


_LOOKS = 10
"""Looks that are kept: of more than three minutes."""
_SHARE_OF_TIME = 0.05
"""The kernel counts shared pages in 4 ms per GiB, and delays the rank's own system calls for memory meanwhile."""


class MemoryHistory:
    """The bytes of each rank of this host at the last looks, to describe a rank that ran out of memory.

    They include the processes that a rank has started. Shared memory is divided among its users.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[int, int]]] = deque(maxlen=_LOOKS)
        self._due_at = 0.0

    def look(self, processes: Mapping[int, int]) -> dict[int, int]:
        """Return what each rank uses now; what it did at the last look, if looking takes long.

        processes: the process of each rank.
        """
        began = time.monotonic()
        if began >= self._due_at:
            uses = _uses_of(processes)
            self._looks.append((began, uses))
            self._due_at = began + (time.monotonic() - began) / _SHARE_OF_TIME
        return {rank: use for rank, use in self._looks[-1][1].items() if rank in processes}

    def in_words(self, rank: int, peak: int, kill: OomKill) -> str:
        """Return what a rank used when it ended, of which limit, and by how much that had grown.

        peak: the most that its own process has ever used.
        """
        looks = [(at, uses) for at, uses in list(self._looks) if rank in uses]
        used = max([peak, *(uses[rank] for _, uses in looks[-2:])])  # at the last look, a part may have been freed
        limit = f"the {binary_size(kill.limit_bytes)} that the cgroup {kill.group} allows"
        if not kill.limit_bytes:
            limit = f"the {binary_size(memory_of_host()[1])} of the host"
        text = f"its processes used {binary_size(used)} of {limit}"
        if looks:
            (began, first), (_, last) = looks[0], looks[-1]
            if others := sum(use for other, use in last.items() if other != rank):
                text += f" (all ranks of the host together: {binary_size(used + others)})"
            if (grown := used - first[rank]) > used / 100:
                text += f"; {binary_size(grown)} more than {duration(time.monotonic() - began)} before"
        return text


def memory_of_host() -> tuple[int, int]:
    """Return the bytes in use and all bytes of the host."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.total - memory.available, memory.total


def _uses_of(processes: Mapping[int, int]) -> dict[int, int]:
    ranks = {pid: rank for rank, pid in processes.items()}
    uses = dict.fromkeys(processes, 0)
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has ended
            rank = ranks.get(os.getsid(pid))
            if rank is not None:
                divided = count_in(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")  # a kernel before 4.14 lacks it
                uses[rank] += 1024 * (divided or count_in(Path(f"/proc/{pid}/status"), "VmRSS:"))
    return uses

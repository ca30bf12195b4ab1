"""Limits, use and kills of the kernel's control groups that contain this process. Runs in: agent, forkserver.

It reads both versions: cgroup v2 (``memory.max``, ``memory.events``, ``cpu.max``) and v1 (``memory.limit_in_bytes``,
``memory.oom_control``, ``cpu.cfs_quota_us``), as described in Documentation/admin-guide/cgroup-{v1,v2} of Linux.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")


def cpu_quota() -> float | None:
    """Return how many CPUs the quotas of the groups allow; None without a quota."""
    quotas = []
    for folder in _own_groups("cpu"):
        quota = text_in(folder / "cpu.max").split() or [
            text_in(folder / "cpu.cfs_quota_us"),
            text_in(folder / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and all(part.isdigit() for part in quota) and int(quota[1]):
            quotas.append(int(quota[0]) / int(quota[1]))
    return min(quotas, default=None)


def memory_limit() -> int | None:
    """Return the smallest memory limit of the groups in bytes; None without a limit."""
    return min((limit for folder in _own_groups("memory") if (limit := _limit_of(folder))), default=None)


def memory_use() -> tuple[int, int] | None:
    """Return the bytes in use and the limit of the group that is closest to its limit; None without a limit.

    Copies of files do not count: the kernel drops them when it needs room.
    """
    limits = {folder: limit for folder in _own_groups("memory") if (limit := _limit_of(folder))}
    uses = [(_use_of(folder), limit) for folder, limit in limits.items()]
    return max(uses, key=lambda use: use[0] / use[1], default=None)


class OomKill(NamedTuple):
    """A process was killed for lack of memory. limit_bytes, group: of the control group; 0 and "" if on another one."""

    limit_bytes: int
    group: str


class OomWatch:
    """Notices processes that the kernel kills for lack of memory after this object was made."""

    def __init__(self) -> None:
        self._groups = {folder: _kills_of(folder) for folder in _own_groups("memory")}
        self._host = count_in(_VMSTAT)

    def killed(self) -> OomKill | None:
        """Return where the kernel has killed, None if it has killed nothing."""
        for folder, before in self._groups.items():
            if _kills_of(folder) > before and (limit := _limit_of(folder)):
                return OomKill(limit, str(folder))
        return OomKill(0, "") if count_in(_VMSTAT) > self._host else None


def _own_groups(controller: str) -> list[Path]:
    """Return the folders of the group of this process and of all groups above it."""
    folders = []
    for line in text_in(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        base = _ROOT if not controllers else _ROOT / controller
        if not controllers or controller in controllers.split(","):
            own = base / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return folders


_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number close to 2**63."""


def _limit_of(folder: Path) -> int | None:
    limit = text_in(folder / "memory.max") or text_in(folder / "memory.limit_in_bytes")
    return int(limit) if limit.isdigit() and int(limit) < _UNLIMITED else None


def _use_of(folder: Path) -> int:
    """Return the bytes that a group with a limit uses, without copies of files."""
    if (used := text_in(folder / "memory.current")).isdigit():
        prefix = ""
    elif (used := text_in(folder / "memory.usage_in_bytes")).isdigit():
        prefix = "total_"  # of the groups below, too, as version 2 has it
    else:
        return 0
    files = [count_in(folder / "memory.stat", f"{prefix}{kind}_file") for kind in ("active", "inactive")]
    return max(0, int(used) - sum(files))


def _kills_of(folder: Path) -> int:
    return max(count_in(folder / "memory.events"), count_in(folder / "memory.oom_control"))


def count_in(path: Path, name: str = "oom_kill") -> int:
    """Return N of the line ``name N``, or ``name N kB``, of a file of the kernel; 0 without such a line or file."""
    lines = (line.split() for line in text_in(path).splitlines())
    return next((int(parts[1]) for parts in lines if len(parts) > 1 and parts[0] == name), 0)


def text_in(path: Path) -> str:
    """Return the content of a kernel file; nothing if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

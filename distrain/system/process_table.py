"""The kernel's table of processes: who is below whom, and what they run. Runs in: anywhere.

On Linux it is read from /proc, which takes a fraction of the time that psutil needs: after a kill of its siblings, a
process may have only milliseconds to kill the rest.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_PROC = Path("/proc")
_HAS_PROC = (_PROC / "self" / "stat").exists()
_TRACKER_CODE = re.compile(rb"from [\w.]+\.resource_tracker import main; ?main\(")
"""What ``python -c`` runs as resource tracker: the one of multiprocessing, or that of loky (joblib)."""
_TORCH_TRACKER = b"torch_shm_manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEntry:
    """A process at the moment at which the table was read.

    group: its process group. began: when it was started, in a unit of the system. It tells the process from a later one
    with the same pid. is_dead: it only waits to be reaped.
    """

    pid: int
    parent: int
    group: int
    began: float
    is_dead: bool


def process_table() -> dict[int, ProcessEntry]:
    """Return all processes that this one can see, by pid."""
    if _HAS_PROC:
        pids = [int(name) for name in os.listdir(_PROC) if name.isdigit()]
    else:
        import psutil

        pids = psutil.pids()
    return {pid: entry for pid in pids if (entry := find_process(pid)) is not None}


def find_process(pid: int) -> ProcessEntry | None:
    """Return a process, or None if there is none with this pid."""
    if not _HAS_PROC:
        return _find_with_psutil(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:  # it has ended
        return None
    state, threads = fields[0], int(fields[17])
    return ProcessEntry(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        began=int(fields[19]),
        is_dead=state in (b"Z", b"X") and threads <= 1,  # other threads may outlive the first one
    )


def _find_with_psutil(pid: int) -> ProcessEntry | None:
    import psutil

    try:
        found = psutil.Process(pid)
        is_dead = found.status() == psutil.STATUS_ZOMBIE
        return ProcessEntry(
            pid=pid, parent=found.ppid(), group=os.getpgid(pid), began=found.create_time(), is_dead=is_dead
        )
    except (psutil.Error, OSError):
        return None


def is_alive(entry: ProcessEntry) -> bool:
    """Tell if the process of an older table still lives."""
    now = find_process(entry.pid)
    return now is not None and now.began == entry.began and not now.is_dead


def below(
    table: Mapping[int, ProcessEntry], roots: Collection[int], spared: Collection[int] = ()
) -> list[ProcessEntry]:
    """Return the descendants of some processes, parents first. Those of ``spared`` are left out, like themselves."""
    children: dict[int, list[ProcessEntry]] = {}
    for entry in table.values():
        children.setdefault(entry.parent, []).append(entry)
    found: list[ProcessEntry] = []
    parents = list(roots)
    while parents:
        level = [child for parent in parents for child in children.get(parent, ()) if child.pid not in spared]
        found += level
        parents = [child.pid for child in level]
    return found


def ancestors(table: Mapping[int, ProcessEntry], pid: int) -> set[int]:
    """Return the pids of all processes above one."""
    found: set[int] = set()
    while (entry := table.get(pid)) is not None and entry.parent not in found:
        pid = entry.parent
        found.add(pid)
    return found


def command_line(pid: int) -> list[bytes]:
    """Return the command line of a process; empty for one that is dead, belongs to the kernel or cannot be seen."""
    if _HAS_PROC:
        try:
            return (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[:-1]
        except OSError:
            return []
    import psutil

    try:
        return [os.fsencode(word) for word in psutil.Process(pid).cmdline()]
    except psutil.Error:
        return []


def environment_of(pid: int, name: str) -> str:
    """Return a variable of the environment with which a process was started; empty if it cannot be seen."""
    if not _HAS_PROC:
        import psutil

        try:
            value: str = psutil.Process(pid).environ().get(name, "")
        except (psutil.Error, OSError):
            return ""
        return value
    prefix = f"{name}=".encode()
    try:
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((os.fsdecode(entry[len(prefix) :]) for entry in variables if entry.startswith(prefix)), "")


def is_resource_tracker(pid: int) -> bool:
    """Tell if a process removes shared memory that others have left, and ends once all of those are dead.

    multiprocessing, loky and torch start such processes. They must live a moment longer than the rest.
    """
    words = command_line(pid)
    runs_code = any(flag == b"-c" and _TRACKER_CODE.match(code) for flag, code in itertools.pairwise(words))
    return runs_code or (bool(words) and os.path.basename(words[0]) == _TORCH_TRACKER)


def catches(pid: int, number: int) -> bool:
    """Tell if a process has a handler for a signal; True where that cannot be seen.

    A process that has become another program (``execv``) has lost its handlers: the signal would kill it.
    """
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return True
    return any(line.startswith("SigCgt:") and int(line.split()[1], 16) >> (number - 1) & 1 for line in lines)

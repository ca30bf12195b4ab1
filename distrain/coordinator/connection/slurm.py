"""The Slurm job of this process: its nodes, their slots, and the name of its run. Runs in: coordinator.

The variables are those that sbatch and salloc set, see "OUTPUT ENVIRONMENT VARIABLES" in their manual pages.
"""

from __future__ import annotations

import re
import shutil
import sys
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain.errors import HostfileError
from distrain.hosts.hostfile import HostSpec
from distrain.system.process import WITHIN_RUN, output_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_COUNT = re.compile(r"(?:.*:)?(\d+)")
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_WORKING_CLUSTER")
"""Variables that name the cluster, not a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The nodes of a job.

    slots_from: the variable, with its value, that says how many slots the nodes have.
    cleared: see :func:`~distrain.coordinator.connection.transport.by_srun`.
    """

    job: str
    hosts: tuple[HostSpec, ...]
    slots_from: str
    cleared: tuple[str, ...]

    @property
    def advice(self) -> str:
        """Advice for a run whose workers need other slots."""
        return (
            f"The slots are those of Slurm job {self.job} ({self.slots_from}): ask Slurm for more tasks, with --ntasks "
            "or --ntasks-per-node. To use this machine only, set the transport to local (--transport local, or "
            "DISTRAIN_TRANSPORT=local)"
        )


def is_in_job(environment: Mapping[str, str]) -> bool:
    """Tell whether this process belongs to a job of Slurm, and is not a rank of a run."""
    is_rank = "TORCHELASTIC_RUN_ID" in environment or WITHIN_RUN in environment
    return bool(environment.get("SLURM_JOB_ID")) and not is_rank


def why_unreachable(environment: Mapping[str, str]) -> str:
    """Return why the nodes of the job of this process cannot be reached from here; empty if they can."""
    problem, listed = "", environment.get("SLURM_JOB_NODELIST", "")
    if missing := [program for program in ("srun", "scontrol") if shutil.which(program) is None]:
        problem = f"SLURM_JOB_ID={environment['SLURM_JOB_ID']} is set, but there is no {missing[0]} in PATH"
    elif not _nodes(listed):
        problem = f"SLURM_JOB_NODELIST={listed}: `scontrol show hostnames` finds no nodes in it"
    return problem and (
        f"{problem}; load Slurm's module, start the run outside of the container, or use this machine only "
        "(--transport local, or DISTRAIN_TRANSPORT=local)"
    )


def find_allocation(environment: Mapping[str, str]) -> Allocation:
    """Return the allocation of this process. Raises HostfileError if it cannot be used."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        raise HostfileError(
            "the transport slurm needs a job of Slurm, but SLURM_JOB_ID is not set; start this with sbatch or in salloc"
        )
    if "SLURM_HET_SIZE" in environment:
        raise HostfileError(
            f"SLURM_HET_SIZE={environment['SLURM_HET_SIZE']}: distrain does not support heterogeneous jobs; ask for "
            "one kind of nodes, or name the hosts (--hosts) and use ssh"
        )
    if problem := why_unreachable(environment):
        raise HostfileError(problem)
    nodes = _nodes(environment.get("SLURM_JOB_NODELIST", ""))
    slots, slots_from = _slots(environment, len(nodes))
    return Allocation(
        job=job,
        hosts=tuple(HostSpec(name=name, address=name, slots=count) for name, count in zip(nodes, slots, strict=True)),
        slots_from=slots_from,
        cleared=tuple(name for name in environment if name.startswith(("SLURM_", "SRUN_")) and name not in _KEPT),
    )


def _nodes(listed: str) -> list[str]:
    """Return the names of a list such as ``gpu[1-3,7],login``; none if Slurm does not know its nodes."""
    names = output_of(["scontrol", "show", "hostnames", listed], ".") if listed else None
    return (names or b"").decode().split()


def tasks_of_nodes(text: str) -> list[int]:
    """Return the number of tasks on each node, from Slurm's ``2(x3),1``."""
    return [int(count) for count, times in _REPEATED.findall(text) for _ in range(int(times or 1))]


def _slots(environment: Mapping[str, str], nodes: int) -> tuple[list[int], str]:
    """Return the slots of each node, and the variable that says so.

    A job with one task per node and several GPUs per node is meant for a launcher that starts one process per GPU.
    """
    name = "SLURM_TASKS_PER_NODE"
    text = environment.get(name, "1")
    tasks = tasks_of_nodes(text)
    if len(tasks) != nodes:
        raise HostfileError(f"{name}={text}: there are {nodes} nodes in SLURM_JOB_NODELIST")
    if set(tasks) == {1}:
        for gpus in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
            found = _COUNT.fullmatch(environment.get(gpus, ""))
            if found and int(found[1]) > 1:
                return [int(found[1])] * nodes, f"{gpus}={environment[gpus]}"
    return tasks, f"{name}={text}"


_runs_without_name = 0
"""The number of runs of this process that were given a name by :func:`run_name`."""


def run_name(environment: Mapping[str, str], argv: Sequence[str] | None = None) -> str | None:
    """Return the name of a run without one: None outside of a batch job.

    In a batch job it is the same when the job is requeued, so that the run continues: it depends on the job, on the
    command line of this process, and on how many runs this process has started before. In salloc, a person may start
    the same command again after a change, which is another run.
    """
    global _runs_without_name
    if not is_in_job(environment):
        return None
    job = environment["SLURM_JOB_ID"]
    if b" BatchFlag=1 " not in (output_of(["scontrol", "show", "job", "--oneliner", job], ".") or b""):
        return None
    _runs_without_name += 1
    command = "\0".join([*(sys.argv if argv is None else argv), str(_runs_without_name)])
    return f"slurm-{job}-{zlib.crc32(command.encode()):08x}"

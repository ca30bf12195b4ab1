"""The launcher that has started this process as one of several ranks, such as torchrun or srun. Runs in: coordinator.

Each launcher describes a rank in environment variables of its own:

- torchrun, accelerate and most others: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
- mpirun: ``OMPI_COMM_WORLD_*`` by Open MPI; ``PMI_*`` and ``MPI_LOCAL*`` by MPICH and Intel MPI (Hydra).
- srun: ``SLURM_PROCID`` and ``SLURM_STEP_*``. In a batch script, which srun has not started, there are no steps.
- Kubeflow: a TrainJob sets torchrun's options ``PET_*``; a PyTorchJob sets RANK, WORLD_SIZE, MASTER_ADDR and
  MASTER_PORT. If torchrun is not started, there is one process per pod.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distrain.api import current
from distrain.api.backend import BackendConfig
from distrain.coordinator.connection.slurm import tasks_of_nodes
from distrain.coordinator.ranks.this_process import only_one
from distrain.errors import LaunchError
from distrain.system import process
from distrain.system.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distrain.api.config import ScalingConfig
    from distrain.worker.job.job import Work

_UNKNOWN = "another launcher"
_TELLING = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "PET_NODE_RANK", "PET_NNODES"),
)
"""Variables without which there is no launcher, and those that say where it has the ranks meet."""
_LOOPBACK = "127.0.0.1"
_TORCH_PORT = 29500
"""The default of torch, for launchers that tell nothing that differs between two of their jobs."""
_PORTS = range(15000, 30000)
"""Ports below those that Linux and Kubernetes hand out by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterLauncher:
    """A rank as another launcher describes it, and the place where all ranks meet.

    name: the command of the launcher, for messages.
    node_rank: index of the host; None if the launcher does not tell.
    address, port: MASTER_ADDR and MASTER_PORT, on rank 0's host.
    cure: what to do if there are no other ranks: the variables that describe it may be left over from another job.
    """

    name: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int | None
    address: str
    port: int
    cure: str = ""

    @property
    def is_one_host(self) -> bool:
        """True if all ranks are on this host."""
        return self.local_world_size == self.world_size

    @property
    def environment(self) -> dict[str, str]:
        """The six variables by which torch finds the other ranks."""
        values = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in values.items()}


def find_launcher(environment: Mapping[str, str]) -> OuterLauncher | None:
    """Return the launcher that has started this process and others, or None.

    A launcher of a single process is none: nothing is different with it. Nor is distrain itself: a rank of a run, and
    what it has started, have the same variables.

    Raises LaunchError if the launcher does not say where the ranks meet.
    """
    if current.session is not None or process.WITHIN_RUN in environment or _within_worker(environment):
        return None
    try:
        found = next(filter(None, (read(environment) for read in _READERS)), None)
    except (ValueError, IndexError) as error:
        raise LaunchError(f"the environment variables of the launcher of this process are damaged: {error}") from None
    if found is None or found.world_size == 1:
        return None
    left = {name: environment[name] for name in _TELLING if environment.get(name)}
    shown = ", ".join(f"{name}={value}" for name, value in left.items())
    return replace(found, cure=f"If nothing has started other processes, {shown} are left over: unset {' '.join(left)}")


def check_launcher(scaling: ScalingConfig, work: Work) -> OuterLauncher | None:
    """Return the launcher whose processes are the workers of this run, or None if there is none.

    Raises LaunchError if it is not clear which processes should train, or if they cannot train together.
    """
    session = current.session
    if session is not None and session.runs_script:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        command = shlex.join(["python", *sys.argv] if spec is None else ["python", "-m", spec.name, *sys.argv[1:]])
        raise LaunchError(
            "this script was started by `distrain run`, and calls fit(), which starts workers of its own. Run it with "
            f"`{command}`; if it does not name its hosts, set DISTRAIN_HOSTS=alpha:4,beta:4 or DISTRAIN_HOSTFILE=FILE"
        )
    if session is not None and session.context.world_size > 1 and session.context.world_rank == 0:
        warn("fit() was called inside train_func: every rank starts a training of its own. Call it once, outside")
    if scaling.num_workers == 0:
        with only_one():
            pass
        if session is not None:
            raise LaunchError(
                "fit() with num_workers=0 was called in a distrain worker, where it is not clear which ranks should "
                "train; call the function itself, or start the script with python or torchrun"
            )
    launcher = find_launcher(os.environ)
    if launcher is not None and (problem := _problem_of(launcher, scaling, work)):
        raise LaunchError(f"{problem}. {launcher.cure}")
    return launcher


def _problem_of(launcher: OuterLauncher, scaling: ScalingConfig, work: Work) -> str:
    """Return why the processes of a launcher cannot be the workers, with a cure; empty if they can."""
    started = f"{launcher.name} has started {launcher.world_size} processes"
    called = f"fit() was called in each of {launcher.world_size} processes that {launcher.name} has started"
    cure = "start the script once, with `python`"
    is_asked_for = scaling.num_workers not in (0, 1)  # 1 is the default, not a request
    if is_asked_for and not scaling.min_workers <= launcher.world_size <= scaling.max_workers:
        return (
            f"{called}, but num_workers is {scaling.num_workers}. Leave num_workers out, so that these processes are "
            f"the workers, or {cure}"
        )
    if scaling.hosts or scaling.hostfile:
        return f"{called}, which are its workers; so leave hosts= and hostfile= out, or {cure}"
    if not work.initialises_backend:
        return (
            f"{started} of `distrain run`, which starts processes itself; start it once, or start the script without it"
        )
    if type(work.backend).gather is BackendConfig.gather:
        able = "only a trainer whose ranks can talk to each other can use them as its workers, such as TorchTrainer"
        return f"{started}, and {able}; use that, or {cure}"
    return ""


# -- one function for each launcher ----------------------------------------------------------------------------------


def _from_torchrun(environment: Mapping[str, str]) -> OuterLauncher | None:
    numbers = _numbers(environment, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if numbers is None or not _has(environment, "MASTER_ADDR", "MASTER_PORT"):
        return None
    node_rank = environment.get("GROUP_RANK")
    return OuterLauncher(
        **numbers,
        name="torchrun" if "TORCHELASTIC_RUN_ID" in environment else _UNKNOWN,
        node_rank=None if node_rank is None else int(node_rank),
        address=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
    )


def _from_open_mpi(environment: Mapping[str, str]) -> OuterLauncher | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")]
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    return _from_mpi(environment, names, job, "mpirun -x MASTER_ADDR=HOST ...")


def _from_mpich(environment: Mapping[str, str]) -> OuterLauncher | None:
    names = ["PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"]
    return _from_mpi(environment, names, None, "mpirun -genv MASTER_ADDR HOST ...")


def _from_mpi(environment: Mapping[str, str], names: list[str], job: str | None, cure: str) -> OuterLauncher | None:
    """``names``: see :func:`_numbers`. ``job``: an id that differs between two jobs, if there is one."""
    numbers = _numbers(environment, *names)
    if numbers is None:
        return None
    is_one_host = numbers["local_world_size"] == numbers["world_size"]
    address = environment.get("MASTER_ADDR") or (_LOOPBACK if is_one_host else "")
    if not address:
        raise LaunchError(
            f"mpirun has started {numbers['world_size']} processes on several hosts, but does not tell them where rank "
            f"0 is. Name the host of rank 0: {cure}"
        )
    return OuterLauncher(**numbers, name="mpirun", node_rank=None, address=address, port=_port(environment, job))


def _from_srun(environment: Mapping[str, str]) -> OuterLauncher | None:
    names = ("SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    if not _has(environment, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", *names):
        return None
    node_rank, world_size = int(environment["SLURM_NODEID"]), int(environment["SLURM_STEP_NUM_TASKS"])
    local_world_size = tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])[node_rank]
    first = _LOOPBACK if local_world_size == world_size else first_host(environment["SLURM_STEP_NODELIST"])
    job = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    return OuterLauncher(
        name="srun",
        rank=int(environment["SLURM_PROCID"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        address=environment.get("MASTER_ADDR") or first,
        port=_port(environment, job),
    )


def _from_train_job(environment: Mapping[str, str]) -> OuterLauncher | None:
    if not environment.get("PET_NNODES", "").isdigit():  # "1:4" is for torchrun
        return None
    names = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    return _from_pods("Kubeflow", environment, *names)


def _from_pytorch_job(environment: Mapping[str, str]) -> OuterLauncher | None:
    found = _from_pods(_UNKNOWN, environment, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if found is not None and found.world_size > 1 and "LOCAL_RANK" in environment:
        raise LaunchError(
            f"fit() was called in one of {found.world_size} processes (WORLD_SIZE), and LOCAL_RANK is set, but not "
            "LOCAL_WORLD_SIZE, the number of processes on this host; set it, too. If they are left over from another "
            "job: unset RANK WORLD_SIZE"
        )
    return found


def _from_pods(
    name: str, environment: Mapping[str, str], rank: str, size: str, address: str, port: str
) -> OuterLauncher | None:
    """Read the variables of these names; there is one process per pod."""
    if not _has(environment, rank, size, address, port):
        return None
    number, world_size = int(environment[rank]), int(environment[size])
    numbers: dict[str, Any] = {"rank": number, "local_rank": 0, "world_size": world_size, "local_world_size": 1}
    place: dict[str, Any] = {"node_rank": number, "address": environment[address], "port": int(environment[port])}
    return OuterLauncher(name=name, **numbers, **place)


_READERS: tuple[Callable[[Mapping[str, str]], OuterLauncher | None], ...] = (
    _from_torchrun,
    _from_open_mpi,  # before srun, with which mpirun starts its daemons on other hosts
    _from_mpich,
    _from_srun,
    _from_train_job,
    _from_pytorch_job,
)


# -- parts of them ---------------------------------------------------------------------------------------------------


def _within_worker(environment: Mapping[str, str]) -> bool:
    """Return True in a worker of distrain, and in what it has started."""
    return environment.get("TORCHELASTIC_RUN_ID") in environment.get(process.RUN_IDS, "").split(":")


def _has(environment: Mapping[str, str], *names: str) -> bool:
    return all(environment.get(name) for name in names)


def _numbers(environment: Mapping[str, str], *names: str) -> dict[str, Any] | None:
    """Read rank, local rank, world size and local world size from the variables of these names, if all are set."""
    fields = ("rank", "local_rank", "world_size", "local_world_size")
    if not _has(environment, *names):
        return None
    return {field: int(environment[name]) for field, name in zip(fields, names, strict=True)}


def _port(environment: Mapping[str, str], job: str | None) -> int:
    """Return the user's MASTER_PORT, or else one that all ranks derive from the id of their job."""
    if environment.get("MASTER_PORT"):
        return int(environment["MASTER_PORT"])
    if job is None:
        return _TORCH_PORT
    return _PORTS[int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "big") % len(_PORTS)]


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's ``n[3-5,7],m1``: n3. The command scontrol may be missing in a container."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", hosts).partition(",")[0]

"""The machines of a run: what they have, and what they are to do. Runs in: anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device that CUDA can show to a process: a whole GPU, or a MIG instance of one.

    name: the product's, as the driver says it. uuid: as CUDA_VISIBLE_DEVICES takes it. board: UUID of the physical GPU.
    """

    name: str
    uuid: str
    board: str

    @property
    def is_mig(self) -> bool:
        return self.uuid != self.board


def gpu_problem(named: Sequence[str], found: Sequence[Gpu]) -> str | None:
    """What is wrong with the GPUs that the hostfile names for a host: ``found`` are those that CUDA shows there, which
    ends at the first bad entry.
    """
    left, listed = list(found), f"gpus={','.join(named)} in the hostfile"
    for entry in named:
        mine = _shown_as(entry, left)
        if not mine:
            which = f"GPU {entry}" if entry.isdigit() else entry
            why = "or that is named twice" if found else "or no NVIDIA driver with libnvidia-ml"
            return f"{listed}, but it has no {which}, {why}; nvidia-smi -L shows there which it has"
        left = [gpu for gpu in left if gpu not in mine]
    return None


def _shown_as(entry: str, left: Sequence[Gpu]) -> list[Gpu]:
    """Which of those that are left stand for an entry; an index may be any GPU, so it is the next."""
    if entry.startswith("MIG-"):
        return [gpu for gpu in left if gpu.uuid.startswith(entry)][:1]
    boards = [gpu.board for gpu in left if entry.isdigit() or gpu.board.startswith(entry)]
    return [gpu for gpu in left if gpu.board in boards[:1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """What an agent found on its host. ``gpus``, in the order of CUDA_VISIBLE_DEVICES, is None when it was not asked to
    look; ``driver_problem`` says why some could not be found.

    cpus: usable ones (affinity and cgroup quota). memory_bytes: what this process may use, 0 if unknown. slots: how
    many ranks the user lets it have; None: any number. network: hosts with equal ones share their loopback interface;
    empty if unknown. address: where other hosts reach it, empty if unknown.
    """

    name: str
    cpus: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] | None = None
    driver_problem: str = ""
    slots: int | None = None
    network: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """What a host is to do: how long it may be silent, how many ranks it takes (None: any number), and where and with
    what its workers run. In ``sys_path``, None stands for what the host's interpreter has itself.
    """

    lease_s: float
    slots: int | None = None
    is_local: bool = False
    directory: str
    sys_path: Sequence[str | None]
    environment: Mapping[str, str] = field(default_factory=dict)


def hidden_gpus_problem(order: HostSettings) -> str | None:
    """Refuse a CUDA_VISIBLE_DEVICES that only the workers would have: their host counts its GPUs without it."""
    shown = order.environment.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return None
    return (
        f"CUDA_VISIBLE_DEVICES={shown} (from worker_runtime_env, --env or DISTRAIN_ENV) would hide GPUs from workers "
        f"that were counted before. Write gpus={shown or '0,1'} behind the host in the hostfile, or without a hostfile "
        "set the variable for the process that launches"
    )

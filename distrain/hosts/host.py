"""Resources and settings of hosts. Runs in: anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MIRROR = "DISTRAIN_MIRROR"
"""Environment variable of workers: the directory below which their host has copies of the user's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that CUDA can show to a process.

    name: name of the product. uuid: accepted by CUDA_VISIBLE_DEVICES. pci: its PCI address as below
    /sys/bus/pci/devices; empty if unknown.
    """

    name: str
    uuid: str
    pci: str = ""

    @property
    def is_mig(self) -> bool:
        """True for an instance of a GPU that is split, whose health NVML does not tell."""
        return self.uuid.startswith("MIG-")


def gpu_problem(named: Sequence[str], found: Sequence[Gpu]) -> str | None:
    """Return the problem with GPUs that the hostfile names for a host, or None.

    found: the GPUs that CUDA shows there. Its list ends at the first entry that names none.
    """
    left, listed = list(found), f"gpus={','.join(named)} in the hostfile"
    for entry in named:
        mine = next((gpu for gpu in left if entry.isdigit() or gpu.uuid.startswith(entry)), None)
        if mine is None:  # an index may be any GPU, so it takes the next one
            which = f"GPU {entry}" if entry.isdigit() else entry
            why = "or that is named twice" if found else "or no NVIDIA driver with libnvidia-ml"
            return f"{listed}, but it has no {which}, {why}; nvidia-smi -L shows there which it has"
        left.remove(mine)
    return None


def collective_variables(interface: str) -> dict[str, str]:
    """Return variables that make Gloo and NCCL connect over an interface."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # '=' excludes eth10 for eth1


def chosen_interface(wanted: str, found: Iterable[str]) -> str:
    """Return the first of the interfaces ``ib0,eth1`` that a host has; empty if it has none of them."""
    names = set(found)
    return next((name for name in wanted.split(",") if name in names), "")


def interface_problem(wanted: str, found: Mapping[str, str]) -> str | None:
    """Return the problem with the interfaces that the user wants, or None.

    found: the address of each interface of the host that can be used.
    """
    if not wanted or chosen_interface(wanted, found):
        return None
    has = ", ".join(f"{name} ({address})" for name, address in found.items()) or "none but loopback"
    names = wanted.replace(",", " or ")
    return f"it has no network interface {names} that is up and has an address (interface={wanted!r}); it has {has}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """Resources that an agent has found on its host.

    cpus: number of CPUs that affinity and cgroup quota allow.
    memory_bytes: memory that this process may use.
    gpus: in the order of CUDA_VISIBLE_DEVICES; None if the agent was not asked to look for them.
    driver_problem: why some GPUs could not be found; empty if there is no problem.
    slots: number of ranks that the user allows on it; None for any number.
    network: hosts with the same value share a loopback interface; empty if unknown.
    address: the address under which other hosts reach it; empty if unknown.
    interface: the one that the user has chosen for the traffic between hosts; empty if there was no choice.
    """

    name: str
    cpus: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] | None = None
    driver_problem: str = ""
    slots: int | None = None
    network: str = ""
    address: str = ""
    interface: str = ""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> HostInfo:
        """Return the object with these fields, which :func:`dataclasses.asdict` has returned."""
        gpus = fields["gpus"]
        return cls(**{**fields, "gpus": None if gpus is None else tuple(Gpu(**gpu) for gpu in gpus)})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """Settings of the user for one host and its workers.

    lease_s: seconds without a sign of life after which the host counts as lost.
    slots: number of ranks that it takes; None for any number.
    directory, environment: of its workers.
    sys_path: of its workers; None stands for the entries of the host's own interpreter.
    interface: names of interfaces, such as ``ib0,eth1``; the ranks connect over the first one that the host has.
    rack: what fails with other hosts of the same name; empty if unknown.
    """

    lease_s: float
    slots: int | None = None
    is_local: bool = False
    directory: str
    sys_path: Sequence[str | None]
    environment: Mapping[str, str] = field(default_factory=dict)
    interface: str = ""
    rack: str = ""


def hidden_gpus_problem(settings: HostSettings) -> str | None:
    """Return why CUDA_VISIBLE_DEVICES must not be set for workers only, or None if it is not.

    The agent counts the GPUs without that variable.
    """
    shown = settings.environment.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return None
    return (
        f"CUDA_VISIBLE_DEVICES={shown} (from worker_runtime_env, --env or DISTRAIN_ENV) would hide GPUs from workers "
        f"that were counted before. Write gpus={shown or '0,1'} behind the host in the hostfile, or without a hostfile "
        "set the variable for the process that launches"
    )

"""The machines of a run: what they have, and what they are to do. Runs in: anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Gpu", "HostFacts", "HostOrder"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What an agent found on its host. ``gpus``, in the order of CUDA_VISIBLE_DEVICES, is None when it was not asked to
    look.

    cpus: usable ones (affinity and cgroup quota). memory_bytes: what this process may use, 0 if unknown. slots: how
    many ranks the user lets it have; None: any number. network: hosts with equal ones share their loopback interface;
    empty if unknown. address: where other hosts reach it, empty if unknown.
    """

    name: str
    cpus: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] | None = None
    slots: int | None = None
    network: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """What a host is to do: how long it may be silent, how many ranks it takes (None: any number), and where and with
    what its workers run. In ``sys_path``, None stands for what the host's interpreter has itself."""

    lease_s: float
    slots: int | None = None
    is_local: bool = False
    directory: str
    sys_path: Sequence[str | None]
    environment: Mapping[str, str] = field(default_factory=dict)

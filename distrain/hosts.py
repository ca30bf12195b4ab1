"""The machines of a run, as facts. Runs in: anywhere."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Gpu", "HostFacts"]


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

    cpus: usable ones (affinity and cgroup quota). memory_bytes: what this process may use, 0 if unknown.
    """

    name: str
    cpus: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] | None = None

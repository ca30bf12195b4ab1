"""Memory and GPUs of this host that are about to end a run, or slow it down. Runs in: agent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distrain.hosts.cgroup import memory_use
from distrain.hosts.gpu_health import GpuHealth, gpu_health
from distrain.hosts.memory import memory_of_host
from distrain.system.text import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distrain.hosts.host import Gpu

_LEAST_FREE = 0.05
"""A host that has less than this share of its memory left will soon kill a process."""
_ENOUGH_FREE = 0.08
"""Once it has more than this share, it is fine again."""
_LEAST_FREE_OF_GPU = 0.02
"""PyTorch keeps memory that it does not use. So a GPU is nearly full in many runs that are fine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A thing that is wrong for a rank. It equals the same one at another time.

    kind: ``memory`` or ``GPU``; ``diverged`` if ranks have found it. problem: which of the possible problems of that
    kind. text: the fact in words.
    """

    rank: int
    kind: str
    problem: str
    text: str = field(compare=False)


def troubles(uses: Mapping[int, int], gpus: Mapping[int, Sequence[Gpu]], before: Sequence[Trouble]) -> list[Trouble]:
    """Return what is wrong with the memory and the GPUs of this host.

    uses: the memory of each rank. gpus: those of each rank, as they were when the run began; none if they are MIG
    instances. before: the result of the last call.
    """
    memory = _memory_troubles(uses, [one for one in before if one.kind == "memory"])
    return [*memory, *(_gpu_troubles(gpus) if any(gpus.values()) else [])]


def _memory_troubles(ranks: Mapping[int, int], before: list[Trouble]) -> list[Trouble]:
    """Return a trouble of the rank that uses most memory if this host, or its control group, has nearly none left.

    The trouble of ``before`` is returned as long as memory is short and the rank is there.
    """
    uses = [(*memory_of_host(), "the host's memory")]
    if (limited := memory_use()) is not None:
        uses.append((*limited, f"the memory limit of {size(limited[1])}"))
    used, limit, what = max(uses, key=lambda use: use[0] / use[1])
    if not ranks or 1 - used / limit > (_ENOUGH_FREE if before else _LEAST_FREE):
        return []
    if before and before[0].rank in ranks:
        return before
    rank = max(ranks, key=lambda rank: ranks[rank])
    text = f"{used / limit:.0%} of {what} is used, {size(ranks[rank])} by this rank"
    return [Trouble(rank=rank, kind="memory", problem="full", text=text)]


def _gpu_troubles(gpus: Mapping[int, Sequence[Gpu]]) -> list[Trouble]:
    uuids = {gpu.uuid for own in gpus.values() for gpu in own}
    health = {found.uuid: found for found in gpu_health(uuids)}
    return [
        Trouble(rank=rank, kind="GPU", problem=f"{problem} {gpu.uuid}", text=text)
        for rank, own in gpus.items()
        for gpu in own
        for problem, text in _problems(gpu, health.get(gpu.uuid))
    ]


def _problems(gpu: Gpu, health: GpuHealth | None) -> Iterator[tuple[str, str]]:
    if health is None:
        yield "silent", f"{gpu.name} at {gpu.pci or gpu.uuid} no longer answers"
        return
    name = f"GPU {health.index}"
    if health.free_bytes < _LEAST_FREE_OF_GPU * health.memory_bytes:
        yield "full", f"{1 - health.free_bytes / health.memory_bytes:.0%} of the memory of {name} is used"
    if health.memory_errors:
        errors = f"{health.memory_errors} uncorrectable memory error{'s' if health.memory_errors > 1 else ''}"
        yield "errors", f"{name} has had {errors} since its driver was loaded"
    if health.repair == "failed":
        yield "repair", f"{name} cannot replace its faulty memory"
    if health.slowed_by:
        yield "slow", f"{name} is slowed down by {' and '.join(health.slowed_by)} ({health.celsius} °C)"

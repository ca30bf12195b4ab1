"""The machines of a run, as facts. Runs in: anywhere."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HostFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What an agent found on its host. ``gpus`` is None when it was not asked to look.

    cpus: usable ones (affinity and cgroup quota). memory_bytes: what this process may use, 0 if unknown.
    """

    name: str
    cpus: int
    memory_bytes: int
    gpus: int | None = None

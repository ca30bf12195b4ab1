"""The ranks of an attempt: the host and the GPUs of each rank, and the facts for its worker. Runs in: anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The placement of one rank: its host, and which of the host's visible GPUs it owns.

    node_rank: index of the host among the hosts of the attempt.
    devices: indices of its GPUs.
    """

    rank: int
    host: str
    local_rank: int
    local_world_size: int
    node_rank: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorldPlan:
    """All ranks of an attempt, in order. The ranks of a host follow each other, if distrain has placed them.

    shares_gpu: some ranks use the same physical GPU.
    shares_network: all hosts share the network of one machine, so that their ranks can connect over its loopback
        interface.
    addresses: the address at which other hosts reach each host; empty if it is not known.
    interfaces: the network interface of each host that the user has chosen; empty where there was no choice.
    """

    ranks: tuple[RankPlan, ...]
    shares_gpu: bool = False
    shares_network: bool = True
    addresses: tuple[str, ...] = ("",)
    interfaces: tuple[str, ...] = ("",)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Host names in the order of their first rank."""
        return tuple(self._by_host)

    @cached_property
    def _by_host(self) -> dict[str, tuple[RankPlan, ...]]:
        found: dict[str, list[RankPlan]] = {}
        for rank in self.ranks:
            found.setdefault(rank.host, []).append(rank)
        return {host: tuple(ranks) for host, ranks in found.items()}

    def on(self, host: str) -> tuple[RankPlan, ...]:
        """Return the ranks on a host."""
        return self._by_host.get(host, ())

    def address_of(self, host: str, found: str = "") -> str:
        """Return the address at which other hosts reach this one; empty if it is not known.

        found: the address that the host has found by itself.
        """
        return _LOOPBACK if self.shares_network else self.addresses[self._by_host[host][0].node_rank] or found

    def peer_of(self, host: str) -> str:
        """Return the address of another host, for a host that must find out its own address; else an empty string."""
        return "" if self.address_of(host) else next(filter(None, self.addresses), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """The facts about a worker and its run that train_func can ask for, as :class:`~distrain.api.context.TrainContext`.

    Ranks count from 0.
    node_rank: index of the worker's host.
    storage_path: the directory or URL that holds the run directory.
    attempt: number of the attempt. A run that is continued does not begin at 0 again.
    devices: indices of the worker's GPUs among those that its process can see.
    shares_gpu: some ranks of the run share a GPU.
    run_id: id of the run; a run that is continued gets a new one.
    metadata: the trainer's ``metadata=``.
    resources: what each worker has, such as ``{"GPU": 1}``.
    filesystem: the filesystem of ``storage_path`` if that is not a URL, as
        :func:`~distrain.system.remote_path.encode_filesystem` writes it.
    validates: the trainer has a validation function.
    sees_storage: the worker's host has the directory ``storage_path``. Otherwise checkpoints go there, and come back,
        over the connection.
    trial_dir: the directory that stands for the run directory on a host that does not see it; else empty.
    """

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    run_name: str
    storage_path: str
    attempt: int
    devices: tuple[int, ...]
    shares_gpu: bool = False
    run_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    filesystem: str = ""
    validates: bool = False
    sees_storage: bool = True
    trial_dir: str = ""

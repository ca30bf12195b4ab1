"""The ranks of an attempt: on which host each of them runs, and with which GPUs. Runs in: anywhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank: where it runs and which of the host's visible GPUs it owns."""

    rank: int
    host: str
    local_rank: int
    local_world_size: int
    node_rank: int
    devices: tuple[int, ...] = ()
    uuids: tuple[str, ...] = ()
    """Of its GPUs, where the host has MIG instances: there CUDA numbers devices differently than their order, and shows
    a process only the first instance, so that others have to be hidden from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldPlan:
    """All ranks of an attempt, in order."""

    ranks: tuple[RankPlan, ...]
    shares_gpu: bool = False
    """Whether any two ranks use the same physical GPU."""
    shares_network: bool = True
    """Whether all hosts are one machine's network, so that their ranks can meet on its loopback interface."""
    addresses: tuple[str, ...] = ("",)
    """Where each of the hosts is reached by others, empty if unknown."""

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names in the order of their first rank."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    def peer_of(self, host: str) -> str:
        """An address of another host, if that of this one has yet to be found out; else empty."""
        if self.shares_network or self.addresses[self.hosts.index(host)]:
            return ""
        return next(filter(None, self.addresses), "")

    def on(self, host: str) -> tuple[RankPlan, ...]:
        return tuple(rank for rank in self.ranks if rank.host == host)

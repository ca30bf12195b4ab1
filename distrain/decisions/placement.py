"""Hosts and scaling config -> every rank, its host, local rank and devices, and its environment. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import ipaddress
import math
import re
from typing import TYPE_CHECKING

from distrain.errors import LaunchError, ResourcesError
from distrain.hosts.world import RankPlan, WorldPlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.config import ScalingConfig
    from distrain.hosts.host import HostInfo

_LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo"


def make_plan(hosts: Sequence[HostInfo], scaling: ScalingConfig, *, num_workers: int | None = None) -> WorldPlan:
    """Place the ranks (``num_workers``, or as many as ``scaling`` says) on the hosts, in order: each is filled up to
    its slots before the next one gets any.

    Raises ResourcesError if they need more slots or GPUs, or more of what ``resources_per_worker`` names, than there
    are.
    """
    slots = {host.name: host.slots for host in hosts}
    shares = shares_of(slots, workers_on(slots, scaling) if num_workers is None else num_workers)
    used = [host for host in hosts if shares[host.name]]
    ranks: list[RankPlan] = []
    boards: list[str] = []  # of all hosts: two of them may be the same machine under two names
    for node_rank, host in enumerate(used):
        share = shares[host.name]
        _check_resources(host, share, scaling)
        _check_gpus(host, scaling)
        is_split = any(gpu.is_mig for gpu in host.gpus or ())
        for local_rank in range(share):
            devices = _devices(local_rank, scaling.gpus_per_worker)
            gpus = [host.gpus[index] for index in devices] if host.gpus else []
            boards += {gpu.board for gpu in gpus}
            ranks.append(
                RankPlan(
                    rank=len(ranks),
                    host=host.name,
                    local_rank=local_rank,
                    local_world_size=share,
                    node_rank=node_rank,
                    devices=tuple(range(len(devices))) if is_split else devices,
                    uuids=tuple(gpu.uuid for gpu in gpus) if is_split else (),
                )
            )
    networks = {host.network for host in used}
    return WorldPlan(
        ranks=tuple(ranks),
        shares_gpu=len(set(boards)) < len(boards),
        shares_network=len(used) == 1 or (len(networks) == 1 and networks != {""}),
        addresses=tuple(host.address for host in used),
    )


def workers_on(slots: Mapping[str, int | None], scaling: ScalingConfig) -> int:
    """How many workers these hosts get: of ``(min, max)``, as many as they have slots for, at least ``min``."""
    total = sum(math.inf if most is None else most for most in slots.values())
    return int(max(scaling.min_workers, min(scaling.max_workers, total)))


def shares_of(slots: Mapping[str, int | None], workers: int) -> dict[str, int]:
    """How many of the ranks each host gets, by name; None is a host without a limit. Raises ResourcesError."""
    shares, left = {}, workers
    for name, most in slots.items():
        shares[name] = left if most is None else min(left, most)
        left -= shares[name]
    if left:
        listed = ", ".join(f"{name} {most}" for name, most in slots.items())
        raise ResourcesError(
            f"num_workers is {workers}, but the hosts have only {workers - left} slots: {listed}. Ask for fewer "
            "workers, or give hosts more slots."
        )
    return shares


def _devices(local_rank: int, gpus: float) -> tuple[int, ...]:
    if not gpus:
        return ()
    if gpus < 1:
        return (local_rank // math.floor(1 / gpus + 1e-9),)
    return tuple(range(local_rank * int(gpus), (local_rank + 1) * int(gpus)))


def _check_resources(host: HostInfo, workers: int, scaling: ScalingConfig) -> None:
    named = dict(scaling.resources_per_worker or {})
    if scaling.use_gpu:
        named["GPU"] = scaling.gpus_per_worker
    available = {"CPU": host.cpus, "GPU": len(host.gpus or ()), "memory": host.memory_bytes}
    for name, each in named.items():
        needed = _needed_gpus(workers, each) if name == "GPU" else workers * each
        known = available[name] or name != "memory"
        if known and needed > available[name] * (1 + 1e-9):
            text = _too_much(host.name, workers, name, each, needed, available[name])
            raise ResourcesError(f"{text} {host.driver_problem}." if name == "GPU" and host.driver_problem else text)


def _check_gpus(host: HostInfo, scaling: ScalingConfig) -> None:
    """Raises ResourcesError for GPUs that are not what was asked for, or that a worker cannot use together."""
    gpus = host.gpus or ()
    if scaling.accelerator_type is not None:
        others = sorted({gpu.name for gpu in gpus if not _is_type(gpu.name, scaling.accelerator_type)})
        if others:
            raise ResourcesError(
                f"{host.name} has {', '.join(others)}, but accelerator_type is {scaling.accelerator_type!r}. Hide the "
                "others with CUDA_VISIBLE_DEVICES, or drop accelerator_type."
            )
    if scaling.gpus_per_worker > 1 and any(gpu.is_mig for gpu in gpus):
        raise ResourcesError(
            f"{host.name}: a process can use one MIG instance only, but resources_per_worker asks for "
            f"{scaling.gpus_per_worker:g} GPUs each. Ask for more workers with one each."
        )


def _is_type(name: str, wanted: str) -> bool:
    """Whether a product name has all parts of an accelerator type as Ray writes it: ``A100-40G`` is an ``NVIDIA
    A100-SXM4-40GB``.
    """
    parts = set(re.split(r"[^a-z0-9]+", name.lower()))
    return all(part in parts or f"{part}b" in parts for part in re.split(r"[^a-z0-9]+", wanted.lower()))


def _needed_gpus(workers: int, each: float) -> float:
    """Whole devices: three workers with 0.4 of a GPU need two, since no worker is split over two."""
    return math.ceil(workers / math.floor(1 / each + 1e-9)) if 0 < each < 1 else workers * each


def _too_much(host: str, workers: int, name: str, each: float, needed: float, available: float) -> str:
    unit = " bytes of memory" if name == "memory" else f" {name}s"
    form = ",.0f" if name == "memory" else "g"
    text = (
        f"{host} has {available:{form}}{unit}, but {workers} worker(s) with {each:{form}} each need {needed:{form}}. "
        "Ask for fewer workers (num_workers) or less per worker (resources_per_worker)"
    )
    if name == "GPU" and not available:
        text += (
            ", or set use_gpu=False: no usable NVIDIA GPU was found (driver missing, or hidden by CUDA_VISIBLE_DEVICES)"
        )
    return text + "."


def rank_environment(
    plan: WorldPlan, rank: RankPlan, *, address: str, port: int, run_id: str, attempt: int, max_restarts: int
) -> dict[str, str]:
    """The variables torchrun sets (torch/distributed/elastic, LocalElasticAgent), and gloo's interface."""
    environment = {
        "RANK": rank.rank,
        "LOCAL_RANK": rank.local_rank,
        "WORLD_SIZE": plan.world_size,
        "LOCAL_WORLD_SIZE": rank.local_world_size,
        "NODE_RANK": rank.node_rank,
        "GROUP_RANK": rank.node_rank,
        "GROUP_WORLD_SIZE": len(plan.hosts),
        "ROLE_RANK": rank.rank,
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": plan.world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    return {name: str(value) for name, value in environment.items()}


def visible_devices(rank: RankPlan) -> dict[str, str]:
    """Whole GPUs are not hidden from any rank of their host, so that LOCAL_RANK indexes them and NCCL can talk directly
    between them. On a host with MIG instances each rank sees only its own.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(rank.uuids)} if rank.uuids else {}


RANK_DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML, by which GPUs are counted and dealt; CUDA's own is fastest first
}
"""Set unless the user has."""


def rendezvous_address(plan: WorldPlan, *, wanted: str | None = None, found: str = "") -> str:
    """MASTER_ADDR: what the user wants, else the address of rank 0's host, which may have been ``found`` by itself.
    Raises LaunchError if other hosts could not reach it.
    """
    return _address_of(plan, plan.hosts[0], wanted=wanted, found=found)


def endpoints_of(
    plan: WorldPlan, found: Mapping[str, str], ports: Mapping[str, Sequence[int]], *, wanted: str | None = None
) -> list[str]:
    """Address and port of every rank, given each host's ports in the order of its ranks, and the address that it may
    have ``found`` by itself; ``wanted``: by the user, for rank 0's host. Raises LaunchError, as
    :func:`rendezvous_address`.
    """
    endpoints = []
    for host in plan.hosts:
        address = _address_of(plan, host, wanted=wanted if host == plan.hosts[0] else None, found=found[host])
        shown = f"[{address}]" if ":" in address else address
        endpoints += [f"{shown}:{port}" for port in ports[host]]
    return endpoints


def _address_of(plan: WorldPlan, host: str, *, wanted: str | None, found: str) -> str:
    """Loopback within one machine."""
    known = _LOOPBACK if plan.shares_network else plan.addresses[plan.hosts.index(host)] or found
    address = wanted or known
    if plan.shares_network or (address and not _is_loopback(address)):
        return address
    others = ", ".join(other for other in plan.hosts if other != host)
    what = f"{address} means another machine on each host" if address else f"the address of {host} is not known"
    rank = plan.on(host)[0].rank
    hint = ", or set MASTER_ADDR in worker_runtime_env or by --env" if rank == 0 else ""
    raise LaunchError(
        f"{host}: rank {rank} cannot be reached from {others}: {what}. Name {host} in the hostfile by an address of "
        f"its own{hint}"
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return address == "localhost"


def rendezvous_network(plan: WorldPlan) -> dict[str, str]:
    """What ties the collectives to the loopback interface where ranks meet there: gloo finds it by itself only if the
    host's name resolves to it. Elsewhere each agent finds the interface.
    """
    return {"GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE} if plan.shares_network else {}

"""The placement of ranks on hosts and GPUs, and what hosts and workers are told about it. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.decisions import pace
from distrain.decisions.events import SendMessage
from distrain.errors import LaunchError, ResourcesError
from distrain.hosts.host import collective_variables
from distrain.hosts.world import RankPlan, WorldPlan
from distrain.system.text import count, name_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.api.config import ScalingConfig
    from distrain.decisions.events import RunRequest
    from distrain.hosts.host import HostInfo
    from distrain.hosts.world import WorkerFacts

_LOOPBACK_INTERFACE = "lo"


def make_plan(hosts: Sequence[HostInfo], scaling: ScalingConfig, *, num_workers: int | None = None) -> WorldPlan:
    """Place the ranks on the hosts, in order: each host is filled up to its slots before the next one gets a rank.

    num_workers: number of ranks; by default as many as ``scaling`` allows on these hosts.

    Raises ResourcesError if the hosts have too few slots or GPUs, or too little of what ``resources_per_worker`` names.
    """
    slots = {host.name: host.slots for host in hosts}
    shares = shares_of(slots, workers_on(slots, scaling) if num_workers is None else num_workers)
    used = [host for host in hosts if shares[host.name]]
    ranks: list[RankPlan] = []
    uuids: list[str] = []  # of the GPUs of all hosts, because two of them may be the same machine under two names
    for node_rank, host in enumerate(used):
        share = shares[host.name]
        _check_resources(host, share, scaling)
        _check_gpus(host, scaling)
        for local_rank in range(share):
            devices = _devices(local_rank, scaling.gpus_per_worker)
            uuids += [host.gpus[index].uuid for index in devices] if host.gpus else []
            ranks.append(
                RankPlan(
                    rank=len(ranks),
                    host=host.name,
                    local_rank=local_rank,
                    local_world_size=share,
                    node_rank=node_rank,
                    devices=devices,
                )
            )
    networks = {host.network for host in used}
    return WorldPlan(
        ranks=tuple(ranks),
        shares_gpu=len(set(uuids)) < len(uuids),
        shares_network=len(used) == 1 or (len(networks) == 1 and networks != {""}),
        addresses=tuple(host.address for host in used),
        interfaces=tuple(host.interface for host in used),
    )


def workers_on(slots: Mapping[str, int | None], scaling: ScalingConfig) -> int:
    """Return how many workers these hosts get: as many as they have slots for, within ``(min, max)``."""
    total = sum(math.inf if most is None else most for most in slots.values())
    return int(max(scaling.min_workers, min(scaling.max_workers, total)))


def shares_of(slots: Mapping[str, int | None], workers: int) -> dict[str, int]:
    """Return how many of the ranks each host gets, by name.

    slots: the limit of each host, or None for a host without a limit.

    Raises ResourcesError if there are too few slots.
    """
    shares, left = {}, workers
    for name, most in slots.items():
        shares[name] = left if most is None else min(left, most)
        left -= shares[name]
    if left:
        listed = name_hosts([f"{name} {most}" for name, most in slots.items()])
        raise ResourcesError(
            f"num_workers is {workers}, but the hosts have only {count(workers - left, 'slot')}: {listed}. Ask for "
            "fewer workers, or give hosts more slots."
        )
    return shares


def _devices(local_rank: int, each: float) -> tuple[int, ...]:
    """Return which of the host's GPUs a rank gets. ``each``: GPUs per worker; below 1, ranks share a GPU."""
    if not each:
        return ()
    if each < 1:
        return (local_rank // math.floor(1 / each + 1e-9),)
    return tuple(range(local_rank * int(each), (local_rank + 1) * int(each)))


def _check_resources(host: HostInfo, workers: int, scaling: ScalingConfig) -> None:
    named = dict(scaling.resources_per_worker or {})
    if scaling.use_gpu:
        named["GPU"] = scaling.gpus_per_worker
    available = {"CPU": host.cpus, "GPU": len(host.gpus or ()), "memory": host.memory_bytes}
    for name, each in named.items():
        needed = _needed_gpus(workers, each) if name == "GPU" else workers * each
        if needed > available[name] * (1 + 1e-9):
            text = _shortage(host.name, workers, name, each, needed, available[name])
            raise ResourcesError(f"{text} {host.driver_problem}." if name == "GPU" and host.driver_problem else text)


def _check_gpus(host: HostInfo, scaling: ScalingConfig) -> None:
    """Raise ResourcesError for GPUs of another type than requested."""
    if scaling.accelerator_type is not None:
        others = sorted({gpu.name for gpu in host.gpus or () if not _is_type(gpu.name, scaling.accelerator_type)})
        if others:
            raise ResourcesError(
                f"{host.name} has {', '.join(others)}, but accelerator_type is {scaling.accelerator_type!r}. Hide the "
                "others with CUDA_VISIBLE_DEVICES, or drop accelerator_type."
            )


def _is_type(name: str, wanted: str) -> bool:
    """Return whether a product name has all parts of an accelerator type in Ray's spelling.

    ``A100-40G`` is an ``NVIDIA A100-SXM4-40GB``.
    """
    parts = set(re.split(r"[^a-z0-9]+", name.lower()))
    return all(part in parts or f"{part}b" in parts for part in re.split(r"[^a-z0-9]+", wanted.lower()))


def _needed_gpus(workers: int, each: float) -> float:
    """Return the number of whole GPUs: three workers with 0.4 each need two, because no worker uses parts of two."""
    return math.ceil(workers / math.floor(1 / each + 1e-9)) if 0 < each < 1 else workers * each


def _shortage(host: str, workers: int, name: str, each: float, needed: float, available: float) -> str:
    unit = "bytes of memory" if name == "memory" else name if available == 1 else f"{name}s"
    form = ",.0f" if name == "memory" else "g"
    text = (
        f"{host} has {available:{form}} {unit}, but {count(workers, 'worker')} with {each:{form}} each need "
        f"{needed:{form}}. "
    )
    if name == "GPU" and not available:
        return text + (
            "Leave out use_gpu=True, or find out why: no usable NVIDIA GPU was found (driver missing, or hidden by "
            "CUDA_VISIBLE_DEVICES)."
        )
    return text + "Ask for fewer workers (num_workers) or less per worker (resources_per_worker)."


# -- the orders to hosts when an attempt begins: the job, and the ranks to start -------------------------------------


class Launch:
    """The launch of one attempt after the other. Set ``meeting_point``."""

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self._prepared: dict[str, int] = {}
        """The hosts that know the job, and for how many workers they are prepared."""
        self.meeting_point: wire.RendezvousPort | None = None
        """The answer of rank 0's host in this attempt."""

    def forget(self, host: str) -> None:
        """Note that a host no longer knows the job."""
        self._prepared.pop(host, None)

    def prepare(self, plan: WorldPlan) -> list[SendMessage]:
        """Send the job to hosts that do not have it, or are prepared for another number of workers."""
        workers = {host: len(plan.on(host)) for host in plan.hosts}
        new = [host for host in plan.hosts if self._prepared.get(host) != workers[host]]
        self._prepared |= workers
        orders: list[SendMessage] = []
        latest: wire.Prepare | None = None
        for host in new:
            message = prepare_message(self._request, host, workers[host])
            latest = latest if message == latest else message  # equal ones are encoded once
            orders.append(SendMessage(host, latest))
        return orders

    def reserve(self, plan: WorldPlan, attempt: int) -> SendMessage:
        """Reserve the port of the rendezvous on rank 0's host.

        Each attempt has a new one, so that no rank can connect to a process of an earlier attempt.
        """
        host = plan.hosts[0]
        return SendMessage(host, wire.ReservePort(attempt=attempt, peer=plan.peer_of(host)))

    def start(self, plan: WorldPlan, checkpoint: str | None, skip_to: Mapping[str, Any]) -> list[SendMessage]:
        """Start the ranks of all hosts. Raise LaunchError if hosts cannot reach each other."""
        assert self.meeting_point is not None
        given = self._request.hosts[plan.hosts[0]].environment.get("MASTER_ADDR")
        address = rendezvous_address(plan, wanted=given, found=self.meeting_point.address)
        meeting = replace(self.meeting_point, address=address)
        spec_of = partial(_worker_spec, self._request, plan, checkpoint=checkpoint, skip_to=skip_to, meeting=meeting)
        named = "" if plan.shares_network else address
        ranks = {host: [_fields_of(spec_of(rank)) for rank in plan.on(host)] for host in plan.hosts}
        return [
            SendMessage(host, wire.Start(attempt=meeting.attempt, ranks=specs, rendezvous=named))
            for host, specs in ranks.items()
        ]


def _worker_spec(
    request: RunRequest,
    plan: WorldPlan,
    rank: RankPlan,
    *,
    checkpoint: str | None,
    skip_to: Mapping[str, Any],
    meeting: wire.RendezvousPort,
) -> wire.WorkerSpec:
    """Return what the worker of this rank needs to start.

    checkpoint: path or URL to resume from. meeting: where the ranks connect to each other.
    """
    settings, first = request.hosts[rank.host], request.hosts[plan.hosts[0]].environment
    failures = request.failure_config
    return wire.WorkerSpec(
        attempt=meeting.attempt,
        rank=rank.rank,
        context=_fields_of(request.worker_facts(plan, rank, meeting.attempt)),
        environment={
            **_rank_environment(request, plan, rank, meeting),
            **{name: first[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in first},  # the user's own
        },
        defaults={**rendezvous_network(plan, rank.node_rank), **RANK_DEFAULTS, **request.backend.defaults},
        checkpoint=checkpoint,
        directory=settings.directory,
        sys_path=list(settings.sys_path),
        argv=request.argv,
        vitals_s=pace.VITALS_S,
        debug_rank=request.debug_rank,
        memory_every=request.memory_every,
        nan_metric=failures.nan_metric if failures.on_nan == "rollback" else None,
        divergence=(failures.on_divergence, failures.divergence_every) if failures.on_divergence != "ignore" else None,
        skip_to=dict(skip_to),
    )


def _fields_of(instance: wire.WorkerSpec | WorkerFacts) -> dict[str, Any]:
    """Return the fields of a dataclass by name. Unlike ``dataclasses.asdict()``, this copies no values."""
    return {name: getattr(instance, name) for name in instance.__dataclass_fields__}


def _rank_environment(
    request: RunRequest, plan: WorldPlan, rank: RankPlan, meeting: wire.RendezvousPort
) -> dict[str, str]:
    """Return the variables that torchrun sets (torch/distributed/elastic, LocalElasticAgent)."""
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
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": meeting.port,
        "TORCHELASTIC_RUN_ID": request.run_id,
        "TORCHELASTIC_RESTART_COUNT": meeting.attempt - request.first_attempt,
        "TORCHELASTIC_MAX_RESTARTS": max(request.failure_config.max_failures, 0),
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    return {name: str(value) for name, value in environment.items()}


def prepare_message(request: RunRequest, host: str, workers: int) -> wire.Prepare:
    """Return the job, and how workers start: forked if user and framework allow it, else as new programs."""
    settings = request.hosts[host]
    return wire.Prepare(
        start_method=request.scaling.start_method if request.backend.may_fork else "spawn",
        preload=list(request.job.preload),
        environment=dict(settings.environment),
        python_flags=request.python_flags,
        directory=settings.directory,
        lease_s=settings.lease_s,
        is_local=settings.is_local,
        workers=workers,
        body=request.job.blob,
        binds_to_cpus=request.scaling.numa_binding is not None,
    )


RANK_DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of NVML, which counted the GPUs; CUDA's default is fastest first
}
"""Environment variables that every rank gets unless the user has set them."""


def rendezvous_address(plan: WorldPlan, *, wanted: str | None = None, found: str = "") -> str:
    """Return MASTER_ADDR: the address of rank 0's host.

    wanted: the address that the user has set.
    found: the address that the host has found by itself.

    Raises LaunchError if other hosts cannot reach rank 0's host at any known address.
    """
    host, *others = plan.hosts
    address = wanted or plan.address_of(host, found)
    if plan.shares_network or (address and not _is_loopback(address)):
        return address
    what = f"{address} means another machine on each host" if address else f"the address of {host} is not known"
    raise LaunchError(
        f"{host}: rank 0 cannot be reached from {name_hosts(others)}: {what}. Name {host} in the hostfile by an "
        "address of its own, or set MASTER_ADDR in worker_runtime_env or by --env"
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a host name
        return address == "localhost"


def rendezvous_network(plan: WorldPlan, node_rank: int = 0) -> dict[str, str]:
    """Return the variables that bind the collectives of a host's ranks to an interface: loopback if all ranks share it.

    Gloo finds that by itself only if the host's name resolves to it. On several machines it is the interface that the
    user has chosen. Without a choice, each agent finds the one that leads to rank 0's host.
    """
    if plan.shares_network:
        return {"GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE}
    interface = plan.interfaces[node_rank]
    return collective_variables(interface) if interface else {}

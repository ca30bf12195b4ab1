"""The hosts of a run, and the transport to each of them. Runs in: coordinator."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.coordinator.connection.slurm import find_allocation, is_in_job, why_unreachable
from distrain.coordinator.connection.transport import Transport, by_srun, by_ssh, this_machine
from distrain.errors import HostfileError
from distrain.hosts.hostfile import HostSpec, check_transport, parse_hostfile, parse_hosts, split_ssh_args
from distrain.system.log import warn_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.api.config import RunConfig, ScalingConfig


def hosts_of(scaling: ScalingConfig, environment: Mapping[str, str]) -> tuple[HostSpec, ...]:
    """Return the hosts to train on. Raises HostfileError.

    They are those of ``scaling``, else of DISTRAIN_HOSTS, else of the file that DISTRAIN_HOSTFILE names, else the nodes
    of the Slurm job of this process, else this machine. Variables of a job may reach a container without srun.
    """
    if scaling.hosts is not None:
        return parse_hosts(scaling.hosts, "ScalingConfig.hosts")
    if scaling.hostfile is not None:
        return _read(os.fspath(scaling.hostfile), "")
    if hosts := environment.get("DISTRAIN_HOSTS"):
        return parse_hosts(hosts, "DISTRAIN_HOSTS")
    if path := environment.get("DISTRAIN_HOSTFILE"):
        return _read(path, "DISTRAIN_HOSTFILE: ")
    if uses_allocation(scaling, environment):
        return find_allocation(environment).hosts
    if is_in_job(environment) and transport_of(scaling, environment) != "local":
        warn_once(f"training on this machine only: {why_unreachable(environment)}")
    return (HostSpec(),)


def uses_allocation(scaling: ScalingConfig, environment: Mapping[str, str]) -> bool:
    """Tell whether the hosts are the nodes of the Slurm job of this process."""
    if scaling.hosts is not None or scaling.hostfile is not None:
        return False
    if environment.get("DISTRAIN_HOSTS") or environment.get("DISTRAIN_HOSTFILE"):
        return False
    chosen = transport_of(scaling, environment)
    has_job = chosen != "local" and is_in_job(environment)
    return chosen == "slurm" or (has_job and not why_unreachable(environment))


def advice_on_slots(scaling: ScalingConfig, environment: Mapping[str, str]) -> str:
    """Return what to do if the hosts have too few slots; empty if the user named the slots."""
    return find_allocation(environment).advice if uses_allocation(scaling, environment) else ""


def _read(path: str, named_by: str) -> tuple[HostSpec, ...]:
    try:
        text = Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise HostfileError(f"{named_by}the hostfile {path!r} cannot be read: {error}") from error
    return parse_hostfile(text, path)


def ssh_args_of(scaling: ScalingConfig, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the user's arguments for ssh: of ``scaling``, else of DISTRAIN_SSH_ARGS. Raises HostfileError."""
    return tuple(scaling.ssh_args) or split_ssh_args(environment.get("DISTRAIN_SSH_ARGS", ""), "DISTRAIN_SSH_ARGS")


def transport_of(scaling: ScalingConfig, environment: Mapping[str, str]) -> str:
    """Return the transport of hosts whose line in the hostfile has none: of ``scaling``, else of DISTRAIN_TRANSPORT.

    Raises HostfileError.
    """
    if scaling.transport != "auto":
        return scaling.transport
    return check_transport(environment.get("DISTRAIN_TRANSPORT") or "auto", "DISTRAIN_TRANSPORT")


def transports_for(
    hosts: Sequence[HostSpec],
    scaling: ScalingConfig,
    environment: Mapping[str, str],
    run: RunConfig,
) -> list[Transport]:
    """Return a transport for each host. Raises HostfileError if one cannot be reached in the way that was chosen.

    run: how long a lease lasts, and what is copied to hosts or made there.
    """
    chosen = transport_of(scaling, environment)
    if chosen == "auto":
        chosen = "slurm" if uses_allocation(scaling, environment) else "ssh"
    shipping = run.shipping_config
    shared: dict[str, Any] = {
        "lease_s": run.failure_config.host_lease_s,
        "ships": shipping.enabled,
        "makes_environment": shipping.env_from is not None,
    }
    ssh_args = ssh_args_of(scaling, environment)
    nodes: frozenset[str] = frozenset()
    if "slurm" in {chosen, *(host.transport for host in hosts)}:
        allocation = find_allocation(environment)
        nodes = frozenset(host.name for host in allocation.hosts)

    def to(host: HostSpec) -> Transport:
        if host.is_local:
            return this_machine(host)
        match host.transport or chosen:
            case "local":
                raise HostfileError(f"{host.name}: the transport local cannot reach other machines; use ssh or auto")
            case "ssh" | "auto":
                return by_ssh(host, ssh_args, **shared)
            case "slurm" if host.address not in nodes:
                raise HostfileError(
                    f"{host.name}: not a node of Slurm job {allocation.job}, which has {', '.join(sorted(nodes))}"
                )
            case "slurm":
                return by_srun(_without_login(host, "srun"), allocation.job, allocation.cleared, **shared)
            case template:
                words = tuple(shlex.split(template))
                return Transport(host=_without_login(host, words[0]), template=words, **shared)

    return [to(host) for host in hosts]


def _without_login(host: HostSpec, program: str) -> HostSpec:
    """Return the host. Raises HostfileError for a user or port, which only ssh can use."""
    if host.user is not None or host.port is not None:
        raise HostfileError(f"{host.name}: {program} takes only the name of a host; remove the user and the port")
    return host

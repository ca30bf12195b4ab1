"""Ray's cluster, which is this machine. Runs in: anywhere."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from distrain.hosts.host_info import host_info
from distrain.hosts.network import own_address
from distrain.system.log import warn_once

if TYPE_CHECKING:
    from collections.abc import Mapping

_QUIET = frozenset({"configure_logging", "ignore_reinit_error", "local_mode", "logging_level"})
"""Arguments of ``ray.init()`` that need no notice."""
_state = {"is_initialized": False}


class NeverRaisedError(Exception):
    """An exception of Ray: of a cluster, an object store, or a task that has not ended."""


class RayContext(nullcontext[Any]):
    """Result of ``ray.init()``."""

    dashboard_url = ""


def init(address: str | None = None, *, runtime_env: Mapping[str, Any] | None = None, **options: Any) -> RayContext:
    """Set the environment variables of ``runtime_env``, here and for the workers of later runs. Start nothing."""
    _state["is_initialized"] = True
    environment = {**(runtime_env or {})}
    set_variables(environment.pop("env_vars", None) or {})
    given = {"address": address, **options, "runtime_env": ", ".join(environment)}
    if ignored := [name for name, value in given.items() if value and name not in _QUIET]:
        warn_once(
            f"ray.init(): no effect for {', '.join(ignored)}: there is no cluster; fit() starts the workers, on this "
            "machine, or on the hosts of --hosts, DISTRAIN_HOSTS or the Slurm job"
        )
    return RayContext()


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables, and have other hosts get them, too."""
    os.environ.update({name: str(value) for name, value in variables.items()})
    if variables:
        before = os.environ.get("DISTRAIN_ENV", "")
        os.environ["DISTRAIN_ENV"] = ",".join(filter(None, (before, *variables)))


def shutdown(**options: object) -> None:
    """Note that Ray is not initialized any more."""
    _state["is_initialized"] = False


def is_initialized() -> bool:
    """Tell if ``ray.init()`` was called."""
    return _state["is_initialized"]


def cluster_resources() -> dict[str, float]:
    """Return what this machine has, by the names of Ray."""
    host = host_info(with_gpus=True)
    resources = {"CPU": float(host.cpus), "memory": float(host.memory_bytes), f"node:{own_address()}": 1.0}
    return resources | ({"GPU": float(len(host.gpus))} if host.gpus else {})


def nodes() -> list[dict[str, Any]]:
    """Return this machine, as Ray describes a node."""
    name, address = socket.gethostname(), own_address()
    facts = {"NodeID": name, "Alive": True, "NodeManagerAddress": address, "NodeManagerHostname": name}
    return [{**facts, "Resources": cluster_resources()}]

"""``ray.init()``, and the functions that describe the cluster, which is this machine. Runs in: anywhere."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from distrain.as_ray.core.actors import kill_all
from distrain.hosts.host_info import host_info
from distrain.hosts.network import own_address
from distrain.system.log import warn_once

if TYPE_CHECKING:
    from collections.abc import Mapping

_is_initialized = False
_WITHOUT_CONSEQUENCE = frozenset({"configure_logging", "ignore_reinit_error", "local_mode", "logging_level"})
"""Arguments of ``ray.init()`` that need no notice."""


class RayContext(dict[str, Any]):
    """Result of ``ray.init()``. As a context manager, it calls ``ray.shutdown()`` at the end."""

    dashboard_url = ""

    def __enter__(self) -> RayContext:
        return self

    def __exit__(self, *error: object) -> None:
        shutdown()


def init(address: str | None = None, **options: Any) -> RayContext:
    """Set the environment variables of ``runtime_env``, here and for the workers of later runs. Start nothing."""
    global _is_initialized
    _is_initialized = True
    runtime_env = dict(options.pop("runtime_env", None) or {})
    set_variables(runtime_env.pop("env_vars", None) or {})
    given = {"address": address, **options}
    named = [name for name, value in given.items() if value is not None and name not in _WITHOUT_CONSEQUENCE]
    named += [f"runtime_env[{name!r}]" for name, value in runtime_env.items() if value]
    if named:
        warn_once(
            f"ray.init(): no effect for {', '.join(named)}: there is no cluster; fit() starts the workers, on this "
            "machine, or on the hosts of --hosts, DISTRAIN_HOSTS or the Slurm job"
        )
    here = own_address()
    return RayContext(address=here, node_ip_address=here, node_id=socket.gethostname())


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables, and have other hosts get them, too."""
    os.environ.update({name: str(value) for name, value in variables.items()})
    if variables:
        before = os.environ.get("DISTRAIN_ENV", "")
        os.environ["DISTRAIN_ENV"] = ",".join(filter(None, (before, *variables)))


def shutdown(**options: object) -> None:
    """Let all actors die."""
    global _is_initialized
    _is_initialized = False
    kill_all()


def is_initialized() -> bool:
    """Tell if ``ray.init()`` was called."""
    return _is_initialized


# -- resources -------------------------------------------------------------------------------------------------------


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


class RuntimeContext:
    """``ray.get_runtime_context()``."""

    def get_node_id(self) -> str:
        """Return the name of this machine."""
        return socket.gethostname()

    def get_job_id(self) -> str:
        """Return an id of this process."""
        return f"{os.getpid():08x}"

    get_worker_id = get_job_id

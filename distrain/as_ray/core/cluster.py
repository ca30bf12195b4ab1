"""``ray.init()``, and the functions that describe the cluster, which is this machine. Runs in: anywhere."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import uuid
from typing import TYPE_CHECKING, Any

from distrain.api import current
from distrain.as_ray.constants import __version__
from distrain.hosts.host_info import host_info
from distrain.hosts.network import own_address
from distrain.system.log import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ID = uuid.uuid4().hex
_is_used = False
"""True between ``ray.init()``, or the first task, and ``ray.shutdown()``."""
at_shutdown: list[Callable[[], None]] = []
"""Functions that ``ray.shutdown()`` calls."""
_WITHOUT_CONSEQUENCE = frozenset({"configure_logging", "ignore_reinit_error", "local_mode", "logging_level"})
"""Arguments of ``ray.init()`` that need no notice."""


class RayContext(dict[str, Any]):
    """Result of ``ray.init()``. As a context manager, it calls ``ray.shutdown()`` at the end."""

    dashboard_url = ""
    python_version = platform.python_version()
    ray_version = __version__

    @property
    def address_info(self) -> dict[str, Any]:
        """The facts as a dict."""
        return dict(self)

    def disconnect(self) -> None:
        """Call ``ray.shutdown()``."""
        shutdown()

    def __enter__(self) -> RayContext:
        return self

    def __exit__(self, *error: object) -> None:
        shutdown()


def init(address: str | None = None, **options: Any) -> RayContext:
    """Set the environment variables of ``runtime_env``, here and for the workers of later runs. Start nothing.

    Raises RuntimeError at a second call without ``ignore_reinit_error``.
    """
    global _is_used
    if _is_used and not options.get("ignore_reinit_error"):
        raise RuntimeError(
            "ray.init() was called before, or a task has run: leave this call out, call ray.shutdown() first, or pass "
            "ignore_reinit_error=True"
        )
    _is_used = True
    runtime_env = dict(options.pop("runtime_env", None) or {})
    _set_variables(runtime_env.pop("env_vars", None) or {})
    given = {"address": address, **options}
    named = [name for name, value in given.items() if value is not None and name not in _WITHOUT_CONSEQUENCE]
    named += [f"runtime_env[{name!r}]" for name, value in runtime_env.items() if value]
    if named:
        warn_once(
            f"ray.init(): {', '.join(named)} without effect: there is no cluster; fit() starts the workers, on this "
            "machine, or on the hosts of --hosts, DISTRAIN_HOSTS or the Slurm job"
        )
    here = own_address()
    return RayContext(address=here, node_ip_address=here, node_id=_ID, session_dir="", webui_url="")


def _set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables, and have other hosts get them, too."""
    os.environ.update({name: str(value) for name, value in variables.items()})
    if variables:
        before = os.environ.get("DISTRAIN_ENV", "")
        os.environ["DISTRAIN_ENV"] = ",".join(filter(None, (before, *variables)))


class RuntimeEnv(dict[str, Any]):
    """``ray.runtime_env.RuntimeEnv``: its arguments as a dict."""

    def __init__(self, **settings: Any) -> None:
        super().__init__({name: value for name, value in settings.items() if value is not None})


def note_use() -> None:
    """Remember that the program uses Ray, as its first task would start Ray."""
    global _is_used
    _is_used = True


def shutdown(**options: object) -> None:
    """Let all actors die."""
    global _is_used
    for action in at_shutdown:
        action()
    _is_used = False


def is_initialized() -> bool:
    """Tell if ``ray.init()`` was called, or any task."""
    return _is_used


# -- resources -------------------------------------------------------------------------------------------------------


def cluster_resources() -> dict[str, float]:
    """Return what this machine has, by the names of Ray."""
    host = host_info(with_gpus=True)
    resources = {"CPU": float(host.cpus), "memory": float(host.memory_bytes), f"node:{own_address()}": 1.0}
    return resources | ({"GPU": float(len(host.gpus))} if host.gpus else {})


def nodes() -> list[dict[str, Any]]:
    """Return this machine, as Ray describes a node."""
    node = {
        "NodeID": _ID,
        "Alive": True,
        "alive": True,
        "NodeManagerAddress": own_address(),
        "NodeManagerHostname": socket.gethostname(),
        "NodeName": own_address(),
        "Resources": cluster_resources(),
        "Labels": {},
    }
    return [node]


def get_gpu_ids() -> list[Any]:
    """Return the GPUs of this process: in a worker its own, else all, as CUDA_VISIBLE_DEVICES counts or names them."""
    count = len(host_info(with_gpus=True).gpus or ())
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    found: list[Any] = [part.strip() for part in listed.split(",")][:count] if listed else list(map(str, range(count)))
    session = current.session
    if session is None:
        return [int(part) if part.isdigit() else part for part in found]
    with contextlib.suppress(IndexError):
        found = [found[session.context.get_local_rank()]]
    return found


class RuntimeContext:
    """``ray.get_runtime_context()``."""

    namespace = "default"
    gcs_address = ""
    was_current_actor_reconstructed = False

    def get_node_id(self) -> str:
        """Return an id of this machine."""
        return _ID

    def get_job_id(self) -> str:
        """Return an id of this process."""
        return f"{os.getpid():08x}"

    get_worker_id = get_job_id

    def get_task_id(self) -> None:
        """Return None, as in Ray's driver."""

    get_actor_id = get_actor_name = get_placement_group_id = get_task_name = get_task_id

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """Return the GPUs of this process."""
        return {"GPU": [str(each) for each in get_gpu_ids()]}

    def get_assigned_resources(self) -> dict[str, float]:
        """Return what this machine has."""
        return {name: amount for name, amount in cluster_resources().items() if name in ("CPU", "GPU")}


def get_runtime_context() -> RuntimeContext:
    """Return the facts of this process."""
    return RuntimeContext()

"""Ray's tasks and actors, which run in place; and its cluster, which is this machine. Runs in: anywhere.

Arguments and results are pickled as Ray pickles them. So a task that changes an argument changes nothing of its
caller's, and an :class:`ObjectRef` can travel to the workers of a run.
"""

from __future__ import annotations

import inspect
import os
import pickle
import socket
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.as_ray.sentences import sentence
from distrain.hosts.host_info import host_info
from distrain.hosts.network import own_address
from distrain.system.arguments import check_type
from distrain.system.log import warn_once
from distrain.system.pickling import pickled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_QUIET = frozenset({"configure_logging", "ignore_reinit_error", "local_mode", "logging_level"})
"""Arguments of ``ray.init()`` that need no notice."""
_state = {"is_initialized": False}


# -- tasks and actors ------------------------------------------------------------------------------------------------


class NeverRaisedError(Exception):
    """An exception of Ray: of a cluster, an object store, or a task that has not ended."""


@dataclass(frozen=True, eq=False)
class ObjectRef:
    """The result of a task, pickled, or the exception that it has raised."""

    outcome: bytes | Exception = field(repr=False)


def put(value: Any, **options: object) -> ObjectRef:
    """Return a reference to a copy of the value."""
    return ObjectRef(pickled(value))


def get(refs: Any, **options: object) -> Any:
    """Return a copy of the result of a task, or a list of them. Raises the exception of the first that has one."""
    if isinstance(refs, (list, tuple)):
        return [get(ref) for ref in refs]
    check_type("ray.get(refs)", refs, ObjectRef, "an ObjectRef, or a list of them")
    if isinstance(refs.outcome, Exception):
        raise refs.outcome
    return pickle.loads(refs.outcome)  # noqa: S301 - made by this program


def wait(refs: list[ObjectRef], *, num_returns: int = 1, **options: object) -> tuple[list[ObjectRef], list[ObjectRef]]:
    """Return the first ``num_returns`` of the references, and the others: all tasks have ended."""
    return refs[:num_returns], refs[num_returns:]


def cancel(ref: ObjectRef, **options: object) -> None:
    """Do nothing, as Ray does for a task that has ended."""


def kill(actor: ActorHandle, *, no_restart: bool = True) -> None:
    """Forget the object of an actor."""
    actor._actor = None


def remote(*args: Any, **options: Any) -> Any:
    """Make a function or a class remote; as a decorator, with or without options."""
    if args:
        return (RemoteClass if inspect.isclass(args[0]) else RemoteFunction)(args[0])
    return lambda target: remote(target).options(**options)


class RemoteFunction:
    """A function, or a method of an actor, that ``.remote()`` runs as a task: at once, in this process."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target
        self._name = getattr(target, "__qualname__", repr(target))

    def options(self, **options: Any) -> RemoteFunction:
        """Return it: options have no effect. Raises TypeError for those on which the result depends."""
        for name in options.keys() & {"get_if_exists", "num_returns"}:
            raise TypeError(f"ray.remote({name}=...) is not supported: {sentence(name)}")
        return self

    def __call__(self, *args: object, **named: object) -> Any:
        raise TypeError(f"{self._name} is remote: call {self._name}.remote(), not {self._name}()")

    def remote(self, *args: Any, **named: Any) -> Any:
        """Run the task, and return the reference to its result, or to its exception."""
        try:
            return ObjectRef(pickled(self._called(args, named)))
        except Exception as error:
            return ObjectRef(error)

    def _called(self, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        warn_once(
            "ray.remote: tasks and actors run in this process, one after the other, and their options have no effect; "
            "use concurrent.futures, joblib or submitit for work that should run side by side"
        )
        result = self._target(*map(_copied, args), **{name: _copied(value) for name, value in named.items()})
        if inspect.iscoroutine(result) or inspect.isgenerator(result):
            result.close()
            raise TypeError(
                f"{self._name}() is async or yields, but tasks run in this process, one after the other: make it a "
                "plain function that returns a list, or call asyncio.run() in it"
            )
        return result


def _copied(argument: Any) -> Any:
    """Return a copy of an argument of a task; the result for a reference, and the actor itself for an actor."""
    if isinstance(argument, ActorHandle):
        return argument
    return get(argument if isinstance(argument, ObjectRef) else put(argument))


class RemoteClass(RemoteFunction):
    """A class, of which ``.remote()`` makes an actor: an object of this process, whose methods are tasks."""

    def remote(self, *args: Any, **named: Any) -> ActorHandle:
        """Return the handle of a new object. An exception of the constructor is raised here."""
        return ActorHandle(self._called(args, named))


class ActorHandle:
    """Handle by which a program calls an actor. Every attribute is one of its methods."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> RemoteFunction:
        if name.startswith("__") or not callable(method := getattr(self._actor, name, None)):
            raise AttributeError(f"the actor has no method {name!r}, or was killed")
        return RemoteFunction(method)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"a Ray actor ({type(self._actor).__name__}) lives in this process, and can be passed to tasks, but not in "
            "a list, and not to workers, which can report metrics and synchronize with ray.train.collective"
        )


# -- the cluster -----------------------------------------------------------------------------------------------------


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

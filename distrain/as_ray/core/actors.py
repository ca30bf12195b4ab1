"""``ray.remote`` for classes: an actor is an object of this process, whose methods are tasks. Runs in: anywhere."""

from __future__ import annotations

import inspect
import os
import uuid
from typing import TYPE_CHECKING, Any

from distrain.api import current
from distrain.as_ray.core.exceptions import ActorDiedError
from distrain.as_ray.core.tasks import ObjectRef, RemoteFunction, call, check_plain, note_options, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Mapping

_actors: dict[str, ActorHandle] = {}
"""The living actors of this process, by their ids."""
_INSTEAD = "workers can report metrics, and synchronize with ray.train.collective"


def remote(*args: Any, **options: Any) -> Any:
    """Make a function or a class remote; as a decorator, with or without options."""
    if len(args) == 1 and not options and callable(args[0]):
        return _remote(args[0], {})
    if args or not options:
        raise TypeError(
            "write @ray.remote without parentheses, or with keyword arguments, such as @ray.remote(num_returns=2)"
        )
    return lambda target: _remote(target, options)


def _remote(target: Any, options: Mapping[str, Any]) -> ActorClass | RemoteFunction:
    return ActorClass(target, options) if inspect.isclass(target) else RemoteFunction(target, options)


class ActorClass:
    """A class whose objects ``.remote()`` makes."""

    def __init__(self, kind: type, options: Mapping[str, Any]) -> None:
        note_options(options)
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            check_plain(f"{kind.__name__}.{name}", member)
        self._kind = kind
        self._options = dict(options)

    def remote(self, *args: Any, **named: Any) -> ActorHandle:
        """Make the object, and return its handle. An exception of the constructor is raised here."""
        name = self._options.get("name")
        if name is not None and current.session is not None and current.session.context.world_size > 1:
            raise RuntimeError(
                f"each worker would have its own actor named {name!r}, which they cannot share: {_INSTEAD}"
            )
        if name is not None and (existing := _find(name)) is not None:
            if self._options.get("get_if_exists"):
                return existing
            raise ValueError(
                f"there is an actor named {name!r} already: choose another name, or get it with ray.get_actor({name!r})"
            )
        given, by_name = unpacked(packed(f"{self._kind.__name__}.__init__", args, named))
        handle = ActorHandle(self._kind(*given, **by_name), name)
        _actors[handle._key] = handle
        return handle

    def options(self, **options: Any) -> ActorClass:
        """Return the class with other options."""
        return ActorClass(self._kind, {**self._options, **options})

    def __call__(self, *args: object, **named: object) -> Any:
        name = self._kind.__name__
        raise TypeError(f"{name} is an actor class: create an actor with {name}.remote(), not {name}()")


class ActorHandle:
    """Handle by which a program calls an actor. Every attribute is one of its methods."""

    def __init__(self, actor: Any, name: str | None) -> None:
        self._key = uuid.uuid4().hex
        self._actor = actor
        self._name = name

    def __getattr__(self, name: str) -> ActorMethod:
        if name.startswith("__") or not callable(getattr(type(self._actor), name, None)):
            raise AttributeError(f"'ActorHandle' object has no attribute {name!r}")
        return ActorMethod(self, name)

    def __reduce__(self) -> tuple[object, ...]:
        return _handle_in, (os.getpid(), self._key, type(self._actor).__name__)


def _handle_in(pid: int, key: str, kind: str) -> ActorHandle:
    """Return the handle in the process of its actor. Raises RuntimeError in any other."""
    if pid != os.getpid():
        raise RuntimeError(
            f"a Ray actor ({kind}) was passed to a worker, but it lives in process {pid}, where workers cannot call "
            f"it: {_INSTEAD}"
        )
    return _actors[key]


class ActorMethod:
    """A method that ``.remote()`` calls."""

    def __init__(self, handle: ActorHandle, name: str) -> None:
        self._handle = handle
        self._name = name

    def remote(self, *args: Any, **named: Any) -> Any:
        """Call the method, and return the reference to its result."""
        if self._handle._key not in _actors:
            return ObjectRef(ActorDiedError("the actor was killed, or ray.shutdown() was called"))
        actor = self._handle._actor
        return call(f"{type(actor).__name__}.{self._name}", getattr(actor, self._name), args, named)

    def __call__(self, *args: object, **named: object) -> Any:
        raise TypeError(f"{self._name}() is a method of an actor: call {self._name}.remote()")


def _find(name: str) -> ActorHandle | None:
    return next((actor for actor in _actors.values() if actor._name == name), None)


def get_actor(name: str, namespace: str | None = None) -> ActorHandle:
    """Return the actor of that name. Raises ValueError if there is none."""
    if (found := _find(name)) is None:
        raise ValueError(f"no living actor of this process is named {name!r}; {_INSTEAD}")
    return found


def kill(actor: ActorHandle, *, no_restart: bool = True) -> None:
    """Let an actor die: every later call gets an ActorDiedError."""
    _actors.pop(actor._key, None)


def kill_all() -> None:
    """Let all actors die: ``ray.shutdown()``."""
    _actors.clear()

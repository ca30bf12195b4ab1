"""``ray.remote`` for classes: an actor is an object of this process, whose methods are tasks. Runs in: anywhere."""

from __future__ import annotations

import inspect
import os
import uuid
from typing import TYPE_CHECKING, Any

from distrain.as_ray.core.exceptions import ActorDiedError
from distrain.as_ray.core.tasks import Remote, RemoteFunction, check_plain, packed, unpacked
from distrain.as_ray.sentences import NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping

_actors: dict[str, ActorHandle] = {}
"""The living actors of this process, by their ids."""


def remote(*args: Any, **options: Any) -> Any:
    """Make a function or a class remote; as a decorator, with or without options."""
    if len(args) == 1 and not options and callable(args[0]):
        return _remote(args[0], {})
    if args or not options:
        raise TypeError(
            "write @ray.remote without parentheses, or with keyword arguments, such as @ray.remote(num_returns=2)"
        )
    return lambda target: _remote(target, options)


def _remote(target: Any, options: Mapping[str, Any]) -> Remote:
    return (ActorClass if inspect.isclass(target) else RemoteFunction)(target, options)


class ActorClass(Remote):
    """A class whose objects ``.remote()`` makes."""

    def remote(self, *args: Any, **named: Any) -> ActorHandle:
        """Make the object, and return its handle. An exception of the constructor is raised here."""
        if self._options.get("get_if_exists"):
            raise TypeError(f"{self._name}.options(get_if_exists=True): {NAMES['get_actor']}")
        for name, member in inspect.getmembers(self._target, inspect.isfunction):
            check_plain(f"{self._name}.{name}", member)
        given, by_name = unpacked(packed(f"{self._name}: the arguments", (args, named)))
        handle = ActorHandle(self._target(*given, **by_name))
        _actors[handle._key] = handle
        return handle


class ActorHandle:
    """Handle by which a program calls an actor. Every attribute is one of its methods."""

    def __init__(self, actor: Any) -> None:
        self._key = uuid.uuid4().hex
        self._actor = actor

    def __getattr__(self, name: str) -> RemoteFunction:
        kind = type(self._actor)
        if name.startswith("__") or not callable(getattr(kind, name, None)):
            raise AttributeError(f"'ActorHandle' object has no attribute {name!r}")

        def method(*args: Any, **named: Any) -> Any:
            if self._key not in _actors:
                raise ActorDiedError("the actor was killed, or ray.shutdown() was called")
            return getattr(self._actor, name)(*args, **named)

        return RemoteFunction(method, {}, f"{kind.__name__}.{name}")

    def __reduce__(self) -> tuple[object, ...]:
        return _handle_in, (os.getpid(), self._key, type(self._actor).__name__)


def _handle_in(pid: int, key: str, kind: str) -> ActorHandle:
    """Return the handle in the process of its actor. Raises RuntimeError in any other."""
    if pid != os.getpid():
        raise RuntimeError(
            f"a Ray actor ({kind}) was passed to a worker, but it lives in process {pid}, where workers cannot call "
            "it: workers can report metrics, and synchronize with ray.train.collective"
        )
    return _actors[key]


def kill(actor: ActorHandle, *, no_restart: bool = True) -> None:
    """Let an actor die: every later call gets an ActorDiedError."""
    _actors.pop(actor._key, None)


def kill_all() -> None:
    """Let all actors die: ``ray.shutdown()``."""
    _actors.clear()

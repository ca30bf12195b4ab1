"""``ray.remote`` for classes: an actor is an object of this process, whose methods are tasks. Runs in: anywhere."""

from __future__ import annotations

import inspect
import os
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any

from distrain.as_ray.core import cluster, tasks
from distrain.as_ray.core.exceptions import ActorAlreadyExistsError, ActorDiedError, RayActorError, RayTaskError
from distrain.as_ray.core.tasks import ObjectRef, RemoteFunction, call, check_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_RETURNS = "__ray_num_returns__"
_KILLED = "the actor was killed, or has left"


def remote(*args: Any, **options: Any) -> Any:
    """Make a function or a class remote; as a decorator, with or without options."""
    if len(args) == 1 and not options and callable(args[0]):
        return _remote(args[0], {})
    if args or not options:
        raise AssertionError(
            "write @ray.remote without parentheses, or with keyword arguments, such as @ray.remote(num_returns=2)"
        )
    return lambda target: _remote(target, options)


def _remote(target: Any, options: Mapping[str, Any]) -> ActorClass | RemoteFunction:
    return ActorClass(target, options) if inspect.isclass(target) else RemoteFunction(target, options)


def method(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a method of an actor; ``num_returns`` has an effect."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, _RETURNS, options.get("num_returns", 1))
        return function

    return decorate


# -- actors ----------------------------------------------------------------------------------------------------------


class _Actor:
    """An actor of this process: its object, or why it is dead."""

    def __init__(self, kind: type, name: str | None) -> None:
        self.kind = kind
        self.name = name
        self.object: Any = None
        self.death: RayActorError | None = None

    def die(self, why: RayActorError) -> None:
        """Forget the object. Every later call gets the error."""
        self.object, self.death = None, why


_actors: dict[str, _Actor] = {}
"""All actors of this process, by their ids."""


def _find(name: str) -> str | None:
    """Return the id of the living actor of that name."""
    return next((key for key, actor in _actors.items() if actor.name == name and actor.death is None), None)


def forget_all() -> None:
    """Let all actors die: ``ray.shutdown()``."""
    for actor in _actors.values():
        actor.die(ActorDiedError("ray.shutdown() was called"))
    _actors.clear()


cluster.at_shutdown.append(forget_all)


class ActorClass:
    """A class whose objects ``.remote()`` makes."""

    def __init__(self, kind: type, options: Mapping[str, Any]) -> None:
        check_options("actors", options)
        members = inspect.getmembers(kind, lambda value: inspect.iscoroutinefunction(value))
        if members:
            raise TypeError(
                f"{kind.__name__}.{members[0][0]}() is async, but the methods of an actor run in this process, one "
                "after the other: make it a plain method, or use asyncio without Ray"
            )
        self.__name__, self.__qualname__, self.__doc__ = kind.__name__, kind.__qualname__, kind.__doc__
        self._kind = kind
        self._options = dict(options)

    def remote(self, *args: Any, **named: Any) -> ActorHandle:
        """Make the object, and return its handle. An exception of the constructor is raised at its first result."""
        name = self._options.get("name")
        if name is not None and (existing := _find(name)) is not None:
            if self._options.get("get_if_exists"):
                return ActorHandle(existing)
            raise ActorAlreadyExistsError(
                f"there is an actor named {name!r} already: choose another name, or get it by ray.get_actor({name!r})"
            )
        key, actor = uuid.uuid4().hex, _Actor(self._kind, name)
        _actors[key] = actor

        def make(*args: Any, **named: Any) -> None:
            actor.object = self._kind(*args, **named)

        ref: ObjectRef = call(f"{self._kind.__name__}.__init__", make, args, named, {})
        if ref.error is not None:
            died = ActorDiedError(f"the constructor of the actor has raised an error: {ref.error}")
            died.__cause__ = ref.error.cause if isinstance(ref.error, RayTaskError) else ref.error
            actor.die(died)
        return ActorHandle(key)

    def options(self, **options: Any) -> ActorClass:
        """Return the class with other options."""
        return ActorClass(self._kind, {**self._options, **options})

    def __call__(self, *args: object, **named: object) -> Any:
        raise TypeError(
            f"{self.__name__} is the class of an actor: make one by {self.__name__}.remote(), not {self.__name__}()"
        )


class ActorHandle:
    """Handle by which a program calls an actor. Every attribute is one of its methods."""

    def __init__(self, key: str) -> None:
        self._ray_actor_id = key

    def __getattr__(self, name: str) -> ActorMethod:
        actor = _actors.get(self._ray_actor_id)
        known = actor is None or name in _SPECIAL or callable(getattr(actor.kind, name, None))
        if not known or (name.startswith("__") and name not in _SPECIAL):
            raise AttributeError(f"'ActorHandle' object has no attribute {name!r}")
        return ActorMethod(self._ray_actor_id, name, {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other._ray_actor_id == self._ray_actor_id

    def __hash__(self) -> int:
        return hash(self._ray_actor_id)

    def __repr__(self) -> str:
        return f"Actor({self._ray_actor_id})"

    def __reduce__(self) -> tuple[object, ...]:
        return _handle_in, (os.getpid(), self._ray_actor_id)


def _handle_in(pid: int, key: str) -> ActorHandle:
    """Return the handle in the process of its actor. Raises RuntimeError in any other."""
    if pid != os.getpid():
        raise RuntimeError(
            f"a Ray actor was passed to a worker, but it is an object of process {pid}, which workers cannot call: "
            "workers can report metrics, and meet with ray.train.collective"
        )
    return ActorHandle(key)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "__ray_ready__": lambda obj: True,
    "__ray_call__": lambda obj, function, *args, **named: function(obj, *args, **named),
    "__ray_terminate__": lambda obj: exit_actor(),
}
"""Methods that every actor has."""


class ActorMethod:
    """A method that ``.remote()`` calls."""

    def __init__(self, key: str, name: str, options: Mapping[str, Any]) -> None:
        self._key = key
        self._name = name
        self._options = options

    def remote(self, *args: Any, **named: Any) -> Any:
        """Call the method, and return the reference to its result."""
        actor = _actors.get(self._key)
        if actor is None or actor.death is not None:
            return ObjectRef(b"", actor.death if actor and actor.death else ActorDiedError(_KILLED))
        special = _SPECIAL.get(self._name)
        function = special or inspect.getattr_static(actor.kind, self._name).__get__(actor.object, actor.kind)
        returns = {"num_returns": getattr(function, _RETURNS, 1), **self._options}

        def run(*args: Any, **named: Any) -> Any:
            try:
                return function(*args, **named) if special is None else function(actor.object, *args, **named)
            except SystemExit:
                actor.die(ActorDiedError(_KILLED))
                raise

        run.__wrapped__ = function  # type: ignore[attr-defined]
        ref = call(f"{actor.kind.__name__}.{self._name}", run, args, named, returns)
        return ObjectRef(b"", actor.death) if actor.death is not None else ref

    def options(self, **options: Any) -> ActorMethod:
        """Return the method with other options."""
        check_options("actor methods", options)
        return ActorMethod(self._key, self._name, {**self._options, **options})

    def __call__(self, *args: object, **named: object) -> Any:
        raise TypeError(f"{self._name}() is a method of an actor: call {self._name}.remote()")


def get_actor(name: str, namespace: str | None = None) -> ActorHandle:
    """Return the actor of that name. Raises ValueError if there is none."""
    if (key := _find(name)) is None:
        raise ValueError(f"no living actor of this process is named {name!r}")
    return ActorHandle(key)


def list_named_actors(all_namespaces: bool = False) -> list[str]:
    """Return the names of the living actors."""
    return [actor.name for actor in _actors.values() if actor.name is not None and actor.death is None]


def kill(actor: ActorHandle, *, no_restart: bool = True) -> None:
    """Let an actor die."""
    if not isinstance(actor, ActorHandle):
        raise ValueError(f"ray.kill() takes the handle of an actor, got {actor!r}")
    if (found := _actors.get(actor._ray_actor_id)) is not None:
        found.die(ActorDiedError(_KILLED))


def exit_actor() -> None:
    """End the actor from one of its methods."""
    raise SystemExit(0)


# -- a pool of actors ------------------------------------------------------------------------------------------------


class ActorPool:
    """``ray.util.ActorPool``: calls that take the actors in turn, and their results in order."""

    def __init__(self, actors: Iterable[ActorHandle]) -> None:
        self._idle = deque(actors)
        self._results: deque[ObjectRef] = deque()

    def submit(self, fn: Callable[[ActorHandle, Any], ObjectRef], value: Any) -> None:
        """Call the next actor."""
        if not self._idle:
            raise ValueError("the pool has no actor")
        self._results.append(fn(self._idle[0], value))
        self._idle.rotate(-1)

    def has_next(self) -> bool:
        """Tell if there is a result."""
        return bool(self._results)

    def get_next(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Return the next result. Raises StopIteration if there is none."""
        if not self._results:
            raise StopIteration("the pool has no further result")
        return tasks.get(self._results.popleft())

    get_next_unordered = get_next

    def map(self, fn: Callable[[ActorHandle, Any], ObjectRef], values: Iterable[Any]) -> Iterator[Any]:
        """Call an actor for each value, and yield the results."""
        self._results.clear()
        for value in values:
            self.submit(fn, value)
        while self._results:
            yield self.get_next()

    map_unordered = map

    def has_free(self) -> bool:
        """Tell if there is an actor."""
        return bool(self._idle)

    def pop_idle(self) -> ActorHandle | None:
        """Take an actor out of the pool."""
        return self._idle.popleft() if self._idle else None

    def push(self, actor: ActorHandle) -> None:
        """Add an actor to the pool."""
        self._idle.append(actor)

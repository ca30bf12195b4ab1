"""``ray.remote`` for functions, and ``ray.get/put/wait``: a task runs at its call, in this process. Runs in: anywhere.

Arguments and results are pickled as Ray pickles them. So a task that changes an argument changes nothing of its
caller's, and an :class:`ObjectRef` can travel to the workers of a run.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from typing import TYPE_CHECKING, Any

from distrain.as_ray.core.exceptions import RayError, task_error
from distrain.system.log import warn_once
from distrain.system.pickling import pickled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_WITHOUT_EFFECT = ("placement_group", "resources", "retry_exceptions", "runtime_env")
"""Options of tasks and actors on which a result may depend in Ray."""


# -- results ---------------------------------------------------------------------------------------------------------


class ObjectRef:
    """The result of a task, pickled, or the error that it has raised."""

    def __init__(self, outcome: bytes | RayError) -> None:
        self._outcome = outcome

    def value(self) -> Any:
        """Return a copy of the result. Raises the error of the task."""
        if isinstance(self._outcome, bytes):
            return pickle.loads(self._outcome)  # noqa: S301 - made by this program
        raise self._outcome.with_traceback(None)


def put(value: Any, **options: object) -> ObjectRef:
    """Return a reference to a copy of the value. Raises TypeError for one that cannot be pickled."""
    try:
        return ObjectRef(pickled(value))
    except Exception as error:
        raise TypeError(f"ray.put(): {value!r} cannot be pickled: {error}") from error


def get(refs: ObjectRef | list[ObjectRef], *, timeout: float | None = None, **options: object) -> Any:
    """Return the result of a task, or a list of results. Raises the error of the first task that has one."""
    if isinstance(refs, ObjectRef):
        return refs.value()
    if not isinstance(refs, list) or not all(isinstance(ref, ObjectRef) for ref in refs):
        raise ValueError(f"ray.get() takes an ObjectRef or a list of them, got {refs!r}")
    _note_order(refs)
    return [ref.value() for ref in refs]


def wait(
    refs: Sequence[ObjectRef], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[ObjectRef], list[ObjectRef]]:
    """Return the first ``num_returns`` of the references, and the others: all tasks have ended."""
    _note_order(refs)
    if not 0 < num_returns <= len(refs):
        raise ValueError(f"num_returns must be between 1 and the {len(refs)} references, got {num_returns}")
    return list(refs[:num_returns]), list(refs[num_returns:])


def _note_order(refs: Sequence[ObjectRef]) -> None:
    """Tell the user once that tasks do not run side by side."""
    if len(refs) > 1:
        warn_once(
            "ray.remote: tasks and actors run in this process, one after the other; use concurrent.futures, joblib or "
            "submitit for work that should run side by side"
        )


def cancel(ref: ObjectRef, **options: object) -> None:
    """Do nothing, as Ray does for a task that has ended."""


# -- calls -----------------------------------------------------------------------------------------------------------


def note_options(options: Mapping[str, Any]) -> None:
    """Tell the user once of options that cannot be met."""
    if ignored := [name for name in _WITHOUT_EFFECT if options.get(name)]:
        warn_once(f"ray.remote({', '.join(ignored)}): no effect because functions and actors run in this process")


def call(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any], returns: Any = 1
) -> Any:
    """Run a task, and return the reference to its result; a list of them for ``num_returns`` other than 1."""
    blob = packed(name, args, named)
    count = returns if isinstance(returns, int) else 1
    refs = [ObjectRef(outcome) for outcome in _outcomes(name, function, blob, count)]
    return None if not refs else refs[0] if len(refs) == 1 else refs


def _outcomes(name: str, function: Callable[..., Any], blob: bytes, count: int) -> Sequence[bytes | RayError]:
    """Return what each reference to a task gets. The error of an argument is the task's own."""
    try:
        args, named = unpacked(blob)
        value = function(*args, **named)
        values = [value] if count == 1 else list(value) if count else []
        if len(values) != count:
            raise ValueError(f"{name} has returned {len(values)} values, but num_returns is {count}")
        return [pickled(each) for each in values]
    except RayError as error:
        return [error] * count
    except Exception as error:
        return [task_error(name, error)] * count


def packed(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> bytes:
    """Return the arguments of a call as bytes. Raises TypeError for one that cannot be pickled."""
    try:
        return pickled((args, dict(named)))
    except Exception as error:
        raise TypeError(f"{name}: the arguments cannot be pickled: {error}") from error


def unpacked(blob: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Return copies of the arguments, and results in place of references to them. Raises the error of a result."""
    args, named = pickle.loads(blob)  # noqa: S301 - made by this program
    return [_value(each) for each in args], {key: _value(each) for key, each in named.items()}


def _value(argument: Any) -> Any:
    return argument.value() if isinstance(argument, ObjectRef) else argument


# -- functions -------------------------------------------------------------------------------------------------------


def check_plain(name: str, function: Callable[..., Any]) -> None:
    """Raise ValueError for a function that is async, or a generator."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ValueError(
            f"{name}() is async or yields, but tasks and methods of actors run in this process, one after the other: "
            "make it a plain function that returns a list, or call asyncio.run() in it"
        )


class RemoteFunction:
    """A function that ``.remote()`` runs as a task."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        note_options(options)
        check_plain(function.__name__, function)
        functools.update_wrapper(self, function)
        self._function = function
        self._options = dict(options)

    def remote(self, *args: Any, **named: Any) -> Any:
        """Run the function, and return the reference to its result."""
        return call(self._function.__name__, self._function, args, named, self._options.get("num_returns", 1))

    def options(self, **options: Any) -> RemoteFunction:
        """Return the function with other options."""
        return RemoteFunction(self._function, {**self._options, **options})

    def __call__(self, *args: object, **named: object) -> Any:
        raise TypeError(f"{self._function.__name__}() is a remote function: call {self._function.__name__}.remote()")

    def __getattr__(self, name: str) -> Any:
        if name == "bind":
            raise AttributeError("bind() is not available: there are no graphs of tasks, call the functions in turn")
        raise AttributeError(f"'RemoteFunction' object has no attribute {name!r}")

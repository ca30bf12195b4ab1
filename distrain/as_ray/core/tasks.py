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

    from typing_extensions import Self

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
    return ObjectRef(packed(f"ray.put(): {value!r}", value))


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


def packed(what: str, value: Any) -> bytes:
    """Return a value as bytes. Raises TypeError if it cannot be pickled."""
    try:
        return pickled(value)
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled: {error}") from error


def unpacked(blob: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Return copies of the arguments, and results in place of references to them. Raises the error of a result."""
    args, named = pickle.loads(blob)  # noqa: S301 - made by this program
    return [_value(each) for each in args], {key: _value(each) for key, each in named.items()}


def _value(argument: Any) -> Any:
    return argument.value() if isinstance(argument, ObjectRef) else argument


class Remote:
    """A function or a class that ``.remote()`` calls.

    name: of it, in error messages; None: its own.
    """

    def __init__(self, target: Any, options: Mapping[str, Any], name: str | None = None) -> None:
        if ignored := [option for option in _WITHOUT_EFFECT if options.get(option)]:
            warn_once(f"ray.remote({', '.join(ignored)}): no effect because functions and actors run in this process")
        self._target = target
        self._options = dict(options)
        self._name: str = name or target.__name__

    def options(self, **options: Any) -> Self:
        """Return it with other options."""
        return type(self)(self._target, {**self._options, **options}, self._name)

    def __call__(self, *args: object, **named: object) -> Any:
        raise TypeError(f"{self._name} is remote: call {self._name}.remote(), not {self._name}()")


class RemoteFunction(Remote):
    """A function that ``.remote()`` runs as a task."""

    def __init__(self, target: Callable[..., Any], options: Mapping[str, Any], name: str | None = None) -> None:
        super().__init__(target, options, name)
        check_plain(self._name, target)
        functools.update_wrapper(self, target)

    def remote(self, *args: Any, **named: Any) -> Any:
        """Run the task, and return the reference to its result; a list of them for ``num_returns`` other than 1."""
        blob = packed(f"{self._name}: the arguments", (args, named))
        refs = [ObjectRef(outcome) for outcome in self._outcomes(blob, self._options.get("num_returns", 1))]
        return None if not refs else refs[0] if len(refs) == 1 else refs

    def _outcomes(self, blob: bytes, count: int) -> Sequence[bytes | RayError]:
        """Return what each reference to a task gets. The error of an argument is the task's own."""
        try:
            args, named = unpacked(blob)
            value = self._target(*args, **named)
            values = [value] if count == 1 else list(value) if count else []
            if len(values) != count:
                raise ValueError(f"{self._name} has returned {len(values)} values, but num_returns is {count}")
            return [pickled(each) for each in values]
        except RayError as error:
            return [error] * count
        except Exception as error:
            return [task_error(self._name, error)] * count


def check_plain(name: str, function: Callable[..., Any]) -> None:
    """Raise ValueError for a function that is async, or a generator."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ValueError(
            f"{name}() is async or yields, but tasks and methods of actors run in this process, one after the other: "
            "make it a plain function that returns a list, or call asyncio.run() in it"
        )

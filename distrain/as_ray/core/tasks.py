"""``ray.remote`` for functions, and ``ray.get/put/wait``: a task runs at its call, in this process. Runs in: anywhere.

Arguments and results are pickled as Ray pickles them. So a task that changes an argument changes nothing of its
caller's, and an :class:`ObjectRef` can travel to the workers of a run.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import time
import uuid
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from distrain.as_ray.core import cluster
from distrain.as_ray.core.exceptions import RayError, RayTaskError, WorkerCrashedError, describe, task_error
from distrain.hosts.host_info import host_info, usable_cpus
from distrain.system.log import warn_once
from distrain.system.pickling import pickled
from distrain.system.ray_names import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

_ELSEWHERE = "use concurrent.futures, joblib or submitit for work that should run side by side"
_NOTICE_AFTER_S = 1.0
"""Seconds that several tasks take, one after the other, before a line says so."""
_RETRIES = 3
"""Ray's default of ``max_retries``."""
OPTIONS = frozenset(
    {
        "_metadata", "accelerator_type", "concurrency_groups", "enable_task_events", "fallback_strategy",
        "get_if_exists", "label_selector", "lifetime", "max_calls", "max_concurrency", "max_pending_calls",
        "max_restarts", "max_retries", "max_task_retries", "memory", "name", "namespace", "num_cpus", "num_gpus",
        "num_returns", "object_store_memory", "placement_group", "placement_group_bundle_index",
        "placement_group_capture_child_tasks", "resources", "retry_exceptions", "runtime_env", "scheduling_strategy",
        "tensor_transport",
    }
)  # fmt: skip
"""The options of Ray's functions and actors."""


# -- results ---------------------------------------------------------------------------------------------------------


class ObjectRef:
    """The result of a task, pickled, or the error that it has raised."""

    def __init__(self, blob: bytes, error: RayError | None = None) -> None:
        self._id = uuid.uuid4().hex
        self._blob = blob
        self._error = error

    def value(self) -> Any:
        """Return a copy of the result. Raises the error of the task."""
        if self._error is None:
            return pickle.loads(self._blob)  # noqa: S301 - made by this program
        if isinstance(self._error, RayTaskError):  # a new one, as each has its own traceback
            raise task_error(*self._error.args)
        raise self._error

    @property
    def error(self) -> RayError | None:
        """The error of the task."""
        return self._error

    def hex(self) -> str:
        """Return its id."""
        return self._id

    def future(self) -> Future[Any]:
        """Return the result as a future of Python, which is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(self.value())
        except RayError as error:
            future.set_exception(error)
        return future

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self.value()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectRef) and other._id == self._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"ObjectRef({self._id})"


def put(value: Any, **options: object) -> ObjectRef:
    """Return a reference to a copy of the value. Raises TypeError for one that cannot be pickled."""
    cluster.note_use()
    if isinstance(value, ObjectRef):
        raise TypeError("Calling 'put' on an ray.ObjectRef is not allowed: put it into a list, if you need that")
    try:
        return ObjectRef(pickled(value))
    except Exception as error:
        raise TypeError(f"Could not serialize the put value {value!r}: {error}") from error


def get(refs: ObjectRef | list[ObjectRef], *, timeout: float | None = None, **options: object) -> Any:
    """Return the result of a task, or a list of results. Raises the error of the first task that has one."""
    pace.rest()
    if isinstance(refs, ObjectRef):
        return refs.value()
    if not isinstance(refs, list):
        raise ValueError(
            f"Invalid type of object refs, {type(refs)}, is given. 'object_refs' must either be an ObjectRef or a list "
            "of ObjectRefs."
        )
    for ref in refs:
        if not isinstance(ref, ObjectRef):
            raise TypeError(f"Attempting to call `get` on the value {ref!r}, which is not an ray.ObjectRef.")
    return [ref.value() for ref in refs]


def wait(
    refs: Sequence[ObjectRef], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[ObjectRef], list[ObjectRef]]:
    """Return the first ``num_returns`` of the references, and the others: all tasks have ended."""
    pace.rest()
    if not isinstance(refs, (list, tuple)) or not all(isinstance(ref, ObjectRef) for ref in refs):
        raise TypeError(f"wait() expected a list of ray.ObjectRef, got {refs!r}")
    if len(set(refs)) != len(refs):
        raise ValueError("Wait requires a list of unique ray_waitables.")
    if not 0 < num_returns <= len(refs):
        raise ValueError(f"num_returns must be between 1 and the {len(refs)} references, got {num_returns}")
    return list(refs[:num_returns]), list(refs[num_returns:])


def cancel(ref: ObjectRef, **options: object) -> None:
    """Do nothing, as Ray does for a task that has ended."""


# -- calls -----------------------------------------------------------------------------------------------------------


class _Pace:
    """The time that tasks take between two calls of ``ray.get()``. More than one were meant to run side by side."""

    def __init__(self) -> None:
        self._calls = 0
        self._seconds = 0.0

    def rest(self) -> None:
        """Begin anew."""
        self._calls, self._seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        """Count a call, and tell the user once if several take long."""
        self._calls += 1
        self._seconds += seconds
        if self._calls > 1 and self._seconds > _NOTICE_AFTER_S:
            warn_once(
                f"ray.remote: tasks and actors run in this process, one after the other, which takes longer here; "
                f"{_ELSEWHERE}"
            )


pace = _Pace()


def check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that Ray has not. Tell the user once of one that cannot be met."""
    for name in options.keys() - OPTIONS:
        raise ValueError(f"Invalid option keyword {name} for {kind}{did_you_mean(name, OPTIONS)}")
    for name, has in (("num_cpus", usable_cpus), ("num_gpus", lambda: len(host_info(with_gpus=True).gpus or ()))):
        wanted = options.get(name) or 0
        if wanted > (1 if name == "num_cpus" else 0) and wanted > (found := has()):
            warn_once(
                f"ray.remote({name}={wanted}): this machine has {found}, and functions and actors run in this process "
                f"all the same; {_ELSEWHERE}"
            )
    if ignored := sorted(name for name in ("runtime_env", "placement_group", "resources") if options.get(name)):
        warn_once(f"ray.remote({', '.join(ignored)}): no effect, as functions and actors run in this process")


def call(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """Run a task, and return the reference to its result; a list of them for ``num_returns`` other than 1.

    A generator function returns an iterator of references.
    """
    cluster.note_use()
    began = time.monotonic()
    outcome = _outcome(name, function, args, named, options)
    pace.add(time.monotonic() - began)
    count = options.get("num_returns", 1)
    if inspect.isgeneratorfunction(inspect.unwrap(function)) and count in (1, "dynamic", "streaming"):
        return iter(
            [ObjectRef(b"", outcome)] if isinstance(outcome, RayError) else [_reference(name, v) for v in outcome]
        )
    if isinstance(outcome, RayError):
        return _several([ObjectRef(b"", outcome)] * (count if isinstance(count, int) else 1))
    if count == 1 or not isinstance(count, int):
        return _reference(name, outcome)
    values = list(outcome) if count else []
    if len(values) != count:
        wrong = ValueError(f"{name} has returned {len(values)} values, but num_returns is {count}")
        return _several([ObjectRef(b"", task_error(name, str(wrong), wrong))] * count)
    return _several([_reference(name, value) for value in values])


def _several(refs: list[ObjectRef]) -> Any:
    return None if not refs else refs[0] if len(refs) == 1 else refs


def _reference(name: str, value: Any) -> ObjectRef:
    try:
        return ObjectRef(pickled(value))
    except Exception as error:
        return ObjectRef(b"", task_error(name, describe(error), error))


def _outcome(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """Return what the function returns, or the error of the task. Errors of its arguments are its own."""
    given = [*args, *named.values()]
    failed = next((ref.error for ref in given if isinstance(ref, ObjectRef) and ref.error is not None), None)
    if failed is not None:
        return failed
    retried = options.get("retry_exceptions") or ()
    kinds = Exception if retried is True else tuple(retried)
    tries = 1 + (options.get("max_retries", _RETRIES) if kinds else 0)
    try:
        blob = pickled((args, dict(named)))
    except Exception as error:
        raise TypeError(f"Could not serialize the arguments of {name}: {error}") from error
    while True:
        tries -= 1
        try:
            positional, by_name = pickle.loads(blob)  # noqa: S301 - made by this program
            value = function(*map(_value, positional), **{key: _value(given) for key, given in by_name.items()})
            return list(value) if inspect.isgenerator(value) else value
        except SystemExit as leaving:
            return WorkerCrashedError(f"{name} has ended its worker: sys.exit({leaving.code!r})")
        except Exception as error:
            if not tries or not isinstance(error, kinds):
                return task_error(name, describe(error), error)


def _value(argument: Any) -> Any:
    return argument.value() if isinstance(argument, ObjectRef) else argument


# -- functions -------------------------------------------------------------------------------------------------------


class RemoteFunction:
    """A function that ``.remote()`` runs as a task."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        check_options("remote functions", options)
        if inspect.iscoroutinefunction(function):
            raise ValueError(
                "'async def' should not be used for remote tasks: wrap the function with `asyncio.run(f())`"
            )
        functools.update_wrapper(self, function)
        self._function = function
        self._options = dict(options)

    def remote(self, *args: Any, **named: Any) -> Any:
        """Run the function, and return the reference to its result."""
        return call(self._function.__name__, self._function, args, named, self._options)

    def options(self, **options: Any) -> RemoteFunction:
        """Return the function with other options."""
        return RemoteFunction(self._function, {**self._options, **options})

    def __call__(self, *args: object, **named: object) -> Any:
        name = f"{self._function.__module__}.{self._function.__name__}"
        raise TypeError(
            f"Remote functions cannot be called directly. Instead of running '{name}()', try '{name}.remote()'."
        )

    def __getattr__(self, name: str) -> Any:
        if name == "bind":
            raise AttributeError("bind() is not available: there are no graphs of tasks, call the functions in turn")
        raise AttributeError(f"'RemoteFunction' object has no attribute {name!r}")


def as_completed(refs: Sequence[ObjectRef], **options: object) -> Iterator[Any]:
    """Yield the results (``ray.util.as_completed``)."""
    return (get(ref) for ref in refs)


def map_unordered(function: RemoteFunction, *iterables: Sequence[Any], **options: object) -> Iterator[Any]:
    """Yield the result of a task for each item (``ray.util.map_unordered``)."""
    return (get(function.remote(*items)) for items in zip(*iterables, strict=False))

"""The exceptions of ``ray.exceptions`` that a program may catch. Runs in: anywhere."""

from __future__ import annotations

import traceback

from distrain.worker.user_code import users_part


class RayError(Exception):
    """Base of the exceptions of this module."""


class RayTaskError(RayError):
    """A task has raised an exception, which is ``cause``. See :func:`task_error`."""

    def __init__(self, function_name: str, traceback_str: str, cause: BaseException) -> None:
        Exception.__init__(self, function_name, traceback_str, cause)  # not that of the cause's class
        self.function_name = function_name
        self.traceback_str = traceback_str
        self.cause = cause

    def __str__(self) -> str:
        return f"ray::{self.function_name}()\n{self.traceback_str}"

    def __reduce__(self) -> tuple[object, ...]:
        return _of_both_classes, (self.function_name, self.traceback_str, self.cause)


def task_error(name: str, cause: BaseException) -> RayTaskError:
    """Return a RayTaskError that ``except`` also catches by the class of its cause."""
    text = "".join(traceback.format_exception(type(cause), cause, users_part(cause)))
    return _of_both_classes(name, text, cause)


def _of_both_classes(name: str, text: str, cause: BaseException) -> RayTaskError:
    kind = type(cause)
    try:
        both = type(f"RayTaskError({kind.__name__})", (RayTaskError, kind), {"__init__": RayTaskError.__init__})
        error: RayTaskError = both(name, text, cause)
    except Exception:  # the class cannot be derived from, or has a constructor that takes other arguments
        error = RayTaskError(name, text, cause)
    error.__cause__ = cause
    return error


class ActorDiedError(RayError):
    """An actor was killed."""


class NeverRaisedError(RayError):
    """Any other exception of Ray: of a cluster, an object store, or a task that has not ended."""

"""The exceptions of ``ray.exceptions`` that a program may catch. Runs in: anywhere."""

from __future__ import annotations

import os
import traceback

from distrain.worker.user_code import users_part


class RayError(Exception):
    """Base of the exceptions of this module."""


class RayTaskError(RayError):
    """A task has raised an exception, which is ``cause``.

    What ``ray.get()`` raises is of the class of the cause, too; see :func:`task_error`.
    """

    def __init__(self, function_name: str, traceback_str: str, cause: BaseException) -> None:
        Exception.__init__(self, function_name, traceback_str, cause)  # not that of the cause's class
        self.function_name = function_name
        self.traceback_str = traceback_str
        self.cause = cause
        self.pid = os.getpid()

    def __str__(self) -> str:
        return f"ray::{self.function_name}()\n{self.traceback_str}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cause!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return task_error, (self.function_name, self.traceback_str, self.cause)

    def as_instanceof_cause(self) -> RayTaskError:
        """Return this error as one of the class of its cause, too."""
        return task_error(self.function_name, self.traceback_str, self.cause)


def task_error(function_name: str, traceback_str: str, cause: BaseException) -> RayTaskError:
    """Return a RayTaskError that ``except`` also catches by the class of its cause, and that has its attributes."""
    kind = type(cause)
    try:
        both = type(
            f"RayTaskError({kind.__name__})",
            (RayTaskError, kind),
            {"__init__": RayTaskError.__init__, "__getattr__": lambda self, name: getattr(self.cause, name)},
        )
        error: RayTaskError = both(function_name, traceback_str, cause)
    except Exception:  # the class cannot be derived from, or has a constructor that takes other arguments
        error = RayTaskError(function_name, traceback_str, cause)
    error.__cause__ = cause
    return error


def describe(error: BaseException) -> str:
    """Return the traceback of an exception, without the frames of the stand-in that called the function."""
    return "".join(traceback.format_exception(type(error), error, users_part(error)))


class RayActorError(RayError):
    """An actor has died."""


class ActorDiedError(RayActorError):
    """An actor was killed, has left, or its constructor has raised an exception."""


class ActorAlreadyExistsError(ValueError, RayError):
    """There is an actor of that name."""


class WorkerCrashedError(RayError):
    """A task has called ``sys.exit()``."""


class NeverRaisedError(RayError):
    """Any other exception of Ray: of a cluster, an object store, or a task that has not ended."""

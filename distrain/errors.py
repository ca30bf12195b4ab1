"""The exception tree. Runs in: anywhere.

::

    DistrainError
    ├── InvalidTransition      a state machine was asked for an illegal move (a bug in distrain)
    ├── WireError              bytes on the wire that are not our protocol
    ├── JobError               train_func or its config cannot be pickled, found or called
    ├── ResourcesError         more GPUs, CPUs or memory asked for than the hosts have
    ├── StorageError           the run directory cannot be used
    ├── CheckpointError        a checkpoint cannot be reported, read or committed
    ├── CollectiveError        ranks cannot meet in barrier() or broadcast_from_rank_zero()
    └── TrainingFailedError    fit() ended without a finished training; ``.result`` is what there is
        ├── WorkerGroupError   at least one rank failed; ``.worker_failures`` tells of each
        │   └── HangError      no rank made progress for ``FailureConfig.hang_timeout_s``
        ├── ControllerError    the run could not go on, and no rank is to blame: a full disk, for one
        │   └── LaunchError    a host or its agent could not be started, or was lost
        └── PreemptionError    somebody asked the run to stop (SIGTERM)

Every class survives pickling with its attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.failures import RankFailure

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "ControllerError",
    "DistrainError",
    "HangError",
    "InvalidTransition",
    "JobError",
    "LaunchError",
    "PreemptionError",
    "ResourcesError",
    "StorageError",
    "TrainingFailedError",
    "WireError",
    "WorkerGroupError",
]


class DistrainError(Exception):
    """Base of everything distrain raises on purpose, bad arguments (ValueError, TypeError) aside."""


class InvalidTransition(DistrainError):
    """A state machine was asked for a move that its table does not have."""


class WireError(DistrainError):
    """The other side of a connection does not speak our protocol, or not our version of it."""


class JobError(DistrainError):
    """The training function or its config cannot be pickled, found or called."""


class ResourcesError(DistrainError):
    """The scaling config asks for more than the hosts have."""


class StorageError(DistrainError):
    """The run directory cannot be created, written or is in use by another run."""


class CheckpointError(DistrainError):
    """A checkpoint cannot be reported, read or committed."""


class CollectiveError(DistrainError):
    """The ranks cannot meet in a collective of :mod:`distrain.collective`: one has finished, or called another one."""


class TrainingFailedError(DistrainError):
    """``fit()`` ended without a finished training.

    ``result`` is the partial :class:`~distrain.Result`: metrics and checkpoints up to the failure.
    """

    def __init__(self, message: str, *, result: Any = None) -> None:
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), self.__dict__)


class WorkerGroupError(TrainingFailedError):
    """At least one rank failed.

    worker_failures: each failed rank's original exception, or a stand-in that says how the process died. culprit: the
        rank to blame, whose exception is also the ``__cause__``. failures: the facts of each, culprit first.
    """

    def __init__(
        self,
        message: str,
        *,
        worker_failures: Mapping[int, BaseException],
        culprit: int,
        exit_code: int = 1,
        failures: Sequence[RankFailure] = (),
        result: Any = None,
    ) -> None:
        super().__init__(message, result=result)
        self.failures = tuple(failures)
        self.worker_failures = dict(worker_failures)
        self.culprit = culprit
        self.exit_code = exit_code


class HangError(WorkerGroupError):
    """No rank has made progress for longer than ``FailureConfig.hang_timeout_s``; the text says where they were."""


class ControllerError(TrainingFailedError):
    """The run could not go on, and no rank is to blame: its directory cannot be written any more, for one."""


class LaunchError(ControllerError):
    """A host or its agent could not be started, or was lost."""


class PreemptionError(TrainingFailedError):
    """Somebody asked the run to stop (SIGTERM of the user's process)."""


def _rebuild(cls: type[TrainingFailedError], message: str, state: dict[str, object]) -> TrainingFailedError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error

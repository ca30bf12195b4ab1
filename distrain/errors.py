"""The exceptions of distrain. Runs in: anywhere.

::

    DistrainError
    ├── InvalidTransition      a state machine was asked for an illegal move (a bug in distrain)
    ├── WireError              bytes on the wire that are not distrain's protocol
    ├── JobError               train_func or its config cannot be pickled, found or called
    ├── HostfileError          a hostfile, hosts= or ssh_args= cannot be read or understood
    ├── ResourcesError         more slots, GPUs, CPUs or memory asked for than the hosts have
    ├── StorageError           the run directory cannot be used
    ├── CheckpointError        a checkpoint cannot be reported, read or committed
    ├── DataError              a dataset cannot be read, or it has changed since the checkpoint
    ├── CollectiveError        ranks cannot meet in barrier() or broadcast_from_rank_zero()
    ├── Rollback               raised by train_func: all ranks go back to the newest checkpoint
    └── TrainingFailedError    fit() ended without a finished training; see its partial ``.result``
        ├── WorkerGroupError   at least one rank failed; see ``.worker_failures``
        │   └── HangError      no rank made progress for ``FailureConfig.hang_timeout_s``
        ├── ControllerError    the run could not continue, and no rank is to blame: a full disk, a lost agent
        │   └── LaunchError    the run could not begin: a host or its agent could not be started
        └── PreemptionError    a signal asked the run to stop (SIGTERM, SIGHUP or SIGQUIT)

Every class survives pickling with its attributes.
"""

from __future__ import annotations

import pickle
import signal
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class DistrainError(Exception):
    """Base of all exceptions that distrain raises on purpose, except ValueError and TypeError for bad arguments.

    ::

        try:
            trainer.fit()
        except DistrainError as error:
            print(f"distrain could not train: {error}")
    """

    __slots__ = ("_render_traceback_",)  # IPython calls it; see hide_own_lines(). It must not be pickled


class InvalidTransition(DistrainError):
    """A state machine was asked for a move that its table does not allow."""


class WireError(DistrainError):
    """The other side of a connection does not use distrain's protocol, or not this version of it."""


class JobError(DistrainError):
    """The training function or its config cannot be pickled, found or called.

    ::

        try:
            trainer.fit()
        except JobError as error:
            print(f"train_func cannot be sent to the workers: {error}")
    """


class HostfileError(DistrainError, ValueError):
    """The hosts to train on cannot be read or understood. The text begins with the file and the line.

    It is a ValueError, too.

    ::

        try:
            trainer.fit()
        except HostfileError as error:
            print(f"correct the hostfile: {error}")
    """


class ResourcesError(DistrainError):
    """The scaling config asks for more than the hosts have.

    ::

        try:
            trainer.fit()
        except ResourcesError as error:
            print(f"ask for fewer workers: {error}")
    """


class StorageError(DistrainError):
    """The run directory cannot be created or written, or another run uses it.

    ::

        try:
            trainer.fit()
        except StorageError as error:
            print(f"choose another storage_path: {error}")
    """


class CheckpointError(DistrainError):
    """A checkpoint cannot be reported, read or committed.

    ::

        try:
            state = checkpoint.to_dict()
        except CheckpointError:
            state = {"step": 0}
    """


class DataError(DistrainError):
    """A dataset cannot be read or divided, or it has changed since the checkpoint.

    ::

        try:
            rows = distrain.data.read_parquet("folder").count()
        except DataError as error:
            print(f"cannot train on this: {error}")
    """


class CollectiveError(DistrainError):
    """A collective of :mod:`distrain.collective` failed: a rank has finished, or has called a different collective.

    ::

        try:
            distrain.collective.barrier()
        except CollectiveError as error:
            print(f"ranks do not call the same function: {error}")
    """


class Rollback(DistrainError):
    """Raise it in train_func, on any rank: all ranks go back to the newest committed checkpoint.

    why: the reason, for people.
    skip_batch: leave out the rows since that checkpoint from now on, including the batch that this rank has just got.

    ::

        if not math.isfinite(loss):
            raise Rollback(f"loss is {loss}", skip_batch=True)
    """

    skip_to: dict[str, Any] | None = None
    """The positions in the data up to which rows are left out; set by distrain."""

    def __init__(self, why: str = "", *, skip_batch: bool = False) -> None:
        super().__init__(why)
        self.skip_batch = skip_batch


class TrainingFailedError(DistrainError):
    """``fit()`` ended without a finished training.

    ``result`` is the partial :class:`~distrain.Result`: metrics and checkpoints up to the failure.

    ::

        try:
            result = trainer.fit()
        except TrainingFailedError as error:
            result = error.result
    """

    result: Any = None

    def __reduce__(self) -> tuple[object, ...]:
        return _recreate, (type(self), self.args, self.__dict__)


class WorkerGroupError(TrainingFailedError):
    """At least one rank failed.

    worker_failures: each failed rank's original exception, or a StandInError that describes how the process ended.
    culprit: the rank to blame. Its exception is ``original``.
    exit_code: the exit code for the user's process.
    failures: the facts of each failure, the culprit first.
    stopped: the ranks that distrain stopped.
    where: lines that describe what the stopped ranks were doing.
    last_lines: the last output of each failed rank.

    ::

        try:
            trainer.fit()
        except WorkerGroupError as error:
            print(error.culprit, error.original, error.worker_failures)
    """

    def __init__(
        self,
        message: str,
        *,
        worker_failures: Mapping[int, BaseException],
        culprit: int,
        exit_code: int = 1,
        failures: Sequence[RankFailure] = (),
        stopped: Sequence[int] = (),
        where: Sequence[str] = (),
        last_lines: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        self.worker_failures = dict(worker_failures)
        self.culprit = culprit
        self.exit_code = exit_code
        self.stopped = tuple(stopped)
        self.where = tuple(where)
        self.last_lines = {rank: list(lines) for rank, lines in (last_lines or {}).items()}

    def __reduce__(self) -> tuple[object, ...]:
        portable = {rank: Portable(error) for rank, error in self.worker_failures.items()}
        return _recreate, (type(self), self.args, {**self.__dict__, "worker_failures": portable})

    @property
    def original(self) -> BaseException | None:
        """The exception that the culprit raised, or None if it raised none, or none that can be pickled."""
        error = self.worker_failures.get(self.culprit)
        return None if isinstance(error, StandInError) else error


class StandInError(RuntimeError):
    """The entry in ``worker_failures`` of a rank that raised no exception, or none that can be pickled."""


class HangError(WorkerGroupError):
    """No rank made progress for longer than ``FailureConfig.hang_timeout_s``. The text shows what each was doing.

    ::

        try:
            trainer.fit()
        except HangError as error:
            print(*error.where, sep="; ")
    """


class ControllerError(TrainingFailedError):
    """The run could not continue, and no rank is to blame: its directory cannot be written, or an agent was lost.

    ::

        try:
            trainer.fit()
        except ControllerError as error:
            print(f"no rank is to blame: {error}")
    """


class LaunchError(ControllerError):
    """The run could not begin: a host or its agent could not be started, or was lost before any training.

    ::

        try:
            trainer.fit()
        except LaunchError as error:
            print(f"no rank has started: {error}")
    """


class PreemptionError(TrainingFailedError):
    """The user's process received SIGTERM, SIGHUP or SIGQUIT.

    exit_code: 128 + the number of the signal, which the process should exit with.

    ::

        try:
            trainer.fit()
        except PreemptionError as error:
            sys.exit(error.exit_code)
    """

    exit_code: int = 128 + signal.SIGTERM

    def __init__(self, message: str, *, exit_code: int = exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Portable:
    """A wrapper that pickles as its exception, even if the constructor takes other arguments than ``Exception``."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        if type(self._error).__reduce__ is not BaseException.__reduce__:
            return self._error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return _recreate, (type(self._error), self._error.args, vars(self._error))


def _recreate(cls: type[BaseException], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    try:
        error = cls(*arguments)
    except Exception:
        error = cls.__new__(cls, *arguments)
        error.args = arguments
    vars(error).update(attributes)
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The failure of one rank.

    kind: ``exception``, ``exit`` (without an exception), ``signal``, ``memory`` (the kernel killed it for lack of
        memory), ``hang``, or ``lost`` (its host was lost, so its end is unknown).
    order: position among the failures of the attempt, as they arrived at the coordinator.
    consequence: a peer had failed before, which explains this failure.
    max_rss_bytes: peak memory of the process, 0 if unknown.
    payload: the pickled exception, if there is one.
    """

    rank: int
    host: str
    order: int
    summary: str
    traceback: str
    exit_code: int
    consequence: bool
    kind: str = "exception"
    signal: int | None = None
    max_rss_bytes: int = 0
    payload: bytes = b""

    @property
    def role(self) -> str:
        """``culprit``, or ``victim`` for a consequence of a peer's failure."""
        return "victim" if self.consequence else "culprit"

    @property
    def lost(self) -> bool:
        """True if the rank's host was lost."""
        return self.kind == "lost"

    def as_json(self) -> dict[str, object]:
        """Return all fields except the pickled exception."""
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("payload", "consequence")}
        return {**shown, "role": self.role}


# All exceptions that are public: those in the tree above.
__all__ = [name for name, one in tuple(vars().items()) if isinstance(one, type) and issubclass(one, DistrainError)]

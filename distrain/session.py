"""What train_func calls: report(), get_context(), get_checkpoint(), under these and older names. Runs in: worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.config import CheckpointUploadMode, ValidationTaskConfig
from distrain.context import CheckpointConsistencyMode, ReportedCheckpoint, TrainContext
from distrain.system.arguments import check_seconds
from distrain.system.ray_names import explain_absent_names
from distrain.worker.report_checks import StoreOptions
from distrain.worker.session import session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distrain.checkpoint import Checkpoint

__all__ = [
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_experiment_name",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_trial_dir",
    "get_trial_id",
    "get_trial_name",
    "get_trial_resources",
    "get_world_rank",
    "get_world_size",
    "report",
    "should_stop",
]

explain_absent_names(__name__)

SYNC, ASYNC, NO_UPLOAD = CheckpointUploadMode


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
    validation: bool | ValidationTaskConfig = False,
) -> None:
    """Report metrics, and optionally a checkpoint, from any rank, any number of times.

    ``metrics`` is copied: numbers, strings, booleans, None, and dicts and lists of them; numpy and torch scalars become
    numbers. Without a checkpoint the call waits for no other rank, and for the coordinator only if 1,000 reports of
    this rank are on their way. With one it returns when the checkpoint's files may be deleted or overwritten; the
    checkpoint is committed once every rank has brought its part. A rank that is more than two checkpoints ahead of
    ranks that bring them, too, waits for those, ``CheckpointConfig.missing_rank_s`` at most.

    checkpoint_dir_name: what its directory in the run directory is to be called, instead of ``checkpoint_000000``; that
        of the lowest rank that names one counts. If there is one of that name, the new one gets a number.
    checkpoint_upload_mode: see :class:`~distrain.CheckpointUploadMode`. With ASYNC at most two checkpoints of a rank
        are on their way at once, and the run ends when all are stored; that one could not be stored is raised by a
        later call. Do not touch its files any more.
    delete_local_checkpoint_after_upload: default: True with ASYNC, else False. Files on the file system of the run
        directory are then moved instead of copied. What is in a committed checkpoint or in the run directory is never
        deleted, and a directory that several ranks bring only when all have stored it; with SYNC the call waits for the
        others' word for a second, and otherwise leaves the files until they have given it. Under torchrun, whose ranks
        hear nothing of each other, a rank's files are left until it brings its next checkpoint, or all ranks have
        finished.
    validation: have the checkpoint validated by the trainer's ``validation_config``, with its usual settings (True) or
        others. What the lowest rank that asks for it says counts.
    checkpoint_upload_fn: called with the checkpoint and a name; stores it as a directory of the run directory by
        itself, and returns the Checkpoint there. The call waits for it in every mode. The name is the same on all ranks
        if they all give one, or none does. The local files are deleted, if they are to be, when it has returned on all
        ranks, unless they have changed by then.

    Raises TypeError or ValueError for metrics that cannot be recorded and for bad arguments, CheckpointError for a
    checkpoint that cannot be stored, RuntimeError outside of a worker.

    ::

        distrain.report({"loss": 0.5}, checkpoint=distrain.Checkpoint.from_dict({"step": 3}))
    """
    storing = StoreOptions(
        name=checkpoint_dir_name,
        mode=checkpoint_upload_mode,
        delete=delete_local_checkpoint_after_upload,
        function=checkpoint_upload_fn,
        validation=ValidationTaskConfig() if validation is True else validation or None,
    )
    session_of("report").report(metrics, checkpoint, storing)


def get_context() -> TrainContext:
    """Who this worker is. Raises RuntimeError outside of a worker.

    ::

        rank = distrain.get_context().get_world_rank()
    """
    return session_of("get_context").context


def get_checkpoint() -> Checkpoint | None:
    """The checkpoint to resume from: the latest committed one of this run, else ``resume_from_checkpoint``, else None.

    Raises RuntimeError outside of a worker.

    ::

        checkpoint = distrain.get_checkpoint()
        step = 0 if checkpoint is None else checkpoint.to_dict()["step"]
    """
    return session_of("get_checkpoint").get_checkpoint()


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED, timeout_s: float | None = None
) -> list[ReportedCheckpoint]:
    """The checkpoints of the run that are kept, in the order in which they were committed, those of earlier attempts
    included. Any rank may ask.

    consistency_mode: what to wait for: that all checkpoints are committed (or dropped) that this rank has brought, or
        that others bring up to the same of their reports, and with VALIDATED, the default, that none waits for its
        validation. Ranks that have reported less often are waited for ``CheckpointConfig.missing_rank_s`` at most.
    timeout_s: after so many seconds, what there is then is returned; None waits for ever.

    Raises RuntimeError outside of a worker.

    ::

        paths = [reported.checkpoint.path for reported in distrain.get_all_reported_checkpoints()]
    """
    if not isinstance(consistency_mode, CheckpointConsistencyMode):
        raise TypeError(
            f"get_all_reported_checkpoints(): consistency_mode must be a CheckpointConsistencyMode, got "
            f"{consistency_mode!r}"
        )
    check_seconds("get_all_reported_checkpoints(): timeout_s", timeout_s, optional=True)
    return session_of("get_all_reported_checkpoints").all_checkpoints(consistency_mode, timeout_s)


def should_stop() -> bool:
    """Return True once the run should stop: after Ctrl-C, SIGTERM (a preemption), SIGHUP or SIGQUIT of your process.

    Call it once per step or epoch on every rank, and leave the loop, with a checkpoint, when it is true. All ranks that
    call it hear it at the same call, so that no rank waits in a collective for another. They have
    ``RunConfig.stop_grace_s`` seconds to finish; ``fit()`` then raises PreemptionError (KeyboardInterrupt after
    Ctrl-C), and the run goes on from its last checkpoint when it is started again. Costs some microseconds.

    Raises RuntimeError outside of a worker.

    ::

        for epoch in range(10):
            if distrain.should_stop():
                break
    """
    return session_of("should_stop").should_stop()


def get_world_rank() -> int:
    """Ray AIR's name for ``get_context().get_world_rank()``; the others likewise.

    ::

        is_first = get_world_rank() == 0
    """
    return get_context().get_world_rank()


def get_world_size() -> int:
    """Return ``get_context().get_world_size()``, under Ray AIR's name.

    ::

        samples = 1000 // get_world_size()
    """
    return get_context().get_world_size()


def get_local_rank() -> int:
    """Return ``get_context().get_local_rank()``, under Ray AIR's name.

    ::

        is_first_of_its_host = get_local_rank() == 0
    """
    return get_context().get_local_rank()


def get_local_world_size() -> int:
    """Return ``get_context().get_local_world_size()``, under Ray AIR's name.

    ::

        threads = 16 // get_local_world_size()
    """
    return get_context().get_local_world_size()


def get_node_rank() -> int:
    """Return ``get_context().get_node_rank()``, under Ray AIR's name.

    ::

        is_on_first_host = get_node_rank() == 0
    """
    return get_context().get_node_rank()


def get_experiment_name() -> str:
    """Return ``get_context().get_experiment_name()``, under Ray AIR's name.

    ::

        title = f"Run {get_experiment_name()}"
    """
    return get_context().get_experiment_name()


def get_trial_name() -> str:
    """Return ``get_context().get_trial_name()``, under Ray AIR's name.

    ::

        title = f"Run {get_trial_name()}"
    """
    return get_context().get_trial_name()


def get_trial_id() -> str:
    """Return ``get_context().get_trial_id()``, under Ray AIR's name.

    ::

        tag = f"run-{get_trial_id()}"
    """
    return get_context().get_trial_id()


def get_trial_dir() -> str:
    """Return ``get_context().get_trial_dir()``, under Ray AIR's name.

    ::

        notes = f"{get_trial_dir()}/notes.txt"
    """
    return get_context().get_trial_dir()


def get_trial_resources() -> dict[str, float]:
    """Return ``get_context().get_trial_resources()``, under Ray AIR's name.

    ::

        cpus = get_trial_resources().get("CPU", 0)
    """
    return get_context().get_trial_resources()

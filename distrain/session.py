"""The functions that train_func calls: report(), get_context(), get_checkpoint() and others. Runs in: worker."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from distrain.api.config import CheckpointUploadMode, StoreOptions, ValidationTaskConfig
from distrain.api.context import CheckpointConsistencyMode, ReportedCheckpoint, TrainContext
from distrain.system.arguments import check_seconds, check_type
from distrain.worker.session import session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distrain.data.iterator import DataIterator
    from distrain.storage.checkpoint import Checkpoint

__all__ = [
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "report",
    "should_stop",
]


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
    validation: bool | ValidationTaskConfig = False,
    *,
    progress: Sequence[float] | None = None,
) -> None:
    """Report metrics, and optionally a checkpoint, from any rank, any number of times.

    ``metrics`` is copied: numbers, strings, booleans, None, and dicts and lists of them; numpy, torch and TensorFlow
    scalars become numbers. Without a checkpoint the call waits for no other rank, and for the coordinator only if
    1,000 reports of this rank are on their way. With a checkpoint it returns when the checkpoint's files may be deleted
    or overwritten. The n-th calls of all ranks belong together: the checkpoint has the files of all of them, and is
    committed once every rank has made its n-th call or has finished.

    checkpoint_dir_name: the name of the checkpoint's directory in the run directory, instead of ``checkpoint_000000``.
        Ranks that give one must give the same. A number is added to a name that is taken already.
    checkpoint_upload_mode: see :class:`~distrain.CheckpointUploadMode`. With ASYNC, do not touch the files after the
        call. At most two checkpoints of a rank are uploaded at the same time, and the run ends when all are stored. If
        one cannot be stored, a later call raises the error. With MEMORY, the files may be changed after the call, and
        it first waits until this rank's previous checkpoint is committed or dropped. If a host is short of memory, the
        files are stored as with ASYNC; ranks that distrain did not start store them as with SYNC.
    delete_local_checkpoint_after_upload: default: True with ASYNC, else False. After the commit, the worker deletes
        the local files at its next report with a checkpoint, or when train_func returns. Then it waits for the commit,
        for up to 5 seconds more when all ranks have finished. It never deletes files of the directory that is just
        being reported. Files stay if train_func raises, if the checkpoint is never committed or the worker is killed
        before, if they were changed since the report, if they are behind a symlink, and if they are in the run
        directory or in a committed checkpoint.
    validation: validate the checkpoint with the trainer's ``validation_config`` (True), or with other settings. If
        ranks give different settings, the lowest rank's are taken.
    checkpoint_upload_fn: is called with the checkpoint and a name, stores the checkpoint as a directory of the run
        directory, and returns it as a Checkpoint. The call waits for it in every mode. The name is the same on all
        ranks if either all ranks or no ranks give one.
    progress: the step, or epoch, that is done, and their number, such as ``(300, 1000)``. The console then shows a bar
        and the time left.

    A call that raises counts, too: its checkpoint is dropped on all ranks. So don't repeat the call on this rank alone.

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
    session_of("report").report(metrics, checkpoint, storing, progress)


def get_context() -> TrainContext:
    """Return the rank, the world size and other facts of this worker. Raises RuntimeError outside of a worker.

    ::

        rank = distrain.get_context().get_world_rank()
    """
    return session_of("get_context").context


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint to resume from, or None if there is none.

    It is the latest committed one of this run, or else ``resume_from_checkpoint``. The first call, if the rank has not
    reported yet, returns the one that the attempt started from, so that all ranks resume from the same.

    After ``report(checkpoint=...)`` it is that checkpoint, on every rank that has made as many reports. The call waits
    until the checkpoints of these reports are committed or dropped, for at most ``CheckpointConfig.missing_rank_s``. It
    does not wait for those that ASYNC stores.

    Raises RuntimeError outside of a worker.

    ::

        checkpoint = distrain.get_checkpoint()
        step = 0 if checkpoint is None else checkpoint.to_dict()["step"]
    """
    return session_of("get_checkpoint").get_checkpoint()


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED, timeout_s: float | None = None
) -> list[ReportedCheckpoint]:
    """Return the checkpoints of the run that are kept, in the order in which they were committed.

    Those of earlier attempts are included. Any rank may call it.

    consistency_mode: with COMMITTED, wait until every checkpoint is committed or dropped that this rank has reported,
        or that other ranks report up to the same number of reports. With VALIDATED, the default, wait also until no
        checkpoint waits for its validation. Ranks that have reported less often are waited for no longer than
        ``CheckpointConfig.missing_rank_s``.
    timeout_s: seconds after which the call returns the checkpoints that there are; None for no limit.

    Raises RuntimeError outside of a worker.

    ::

        paths = [reported.checkpoint.path for reported in distrain.get_all_reported_checkpoints()]
    """
    call, allowed = "get_all_reported_checkpoints()", "a CheckpointConsistencyMode"
    check_type(f"{call}: consistency_mode", consistency_mode, CheckpointConsistencyMode, allowed)
    check_seconds(f"{call}: timeout_s", timeout_s, optional=True)
    return session_of("get_all_reported_checkpoints").all_checkpoints(consistency_mode, timeout_s)


def get_dataset_shard(dataset_name: str | None = None) -> DataIterator:
    """Return this worker's part of a dataset of the trainer, ``TorchTrainer(datasets={"train": ...})``.

    The position in it is stored in every checkpoint. A resumed run continues there; see
    :class:`~distrain.data.DataIterator`. Every call with the same name returns the same object.

    dataset_name: None for the only dataset, or for "train".

    Raises KeyError for an unknown name, RuntimeError outside of a worker.

    ::

        for batch in distrain.get_dataset_shard("train").iter_torch_batches(batch_size=32):
            ...
    """
    return session_of("get_dataset_shard").dataset_shard(dataset_name)


def should_stop() -> bool:
    """Return True once the run should stop: after Ctrl-C, SIGTERM (a preemption), SIGHUP or SIGQUIT of your process.

    Call it once per step or epoch on every rank; when it is true, report a checkpoint and leave the loop. It becomes
    true in the same call on all ranks that call it, so that no rank waits in a collective for another. The ranks have
    ``RunConfig.stop_grace_s`` seconds to finish; ``fit()`` then raises PreemptionError (KeyboardInterrupt after
    Ctrl-C). The run resumes from its last checkpoint when it is started again. A call takes some microseconds.

    Raises RuntimeError outside of a worker.

    ::

        for epoch in range(10):
            if distrain.should_stop():
                break
    """
    return session_of("should_stop").should_stop()


@cache
def __getattr__(name: str) -> Any:
    """Return a method of the context under Ray AIR's name, such as ``session.get_world_rank()``."""
    if name.startswith("get_") and hasattr(TrainContext, name):
        return lambda: getattr(get_context(), name)()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Checks of the arguments of report() and of get_all_reported_checkpoints(). Runs in: worker."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.api.config import CheckpointUploadMode, StoreOptions
from distrain.errors import CheckpointError, Rollback
from distrain.storage.checkpoint import MANIFEST_FILE, Checkpoint, absence_of
from distrain.storage.files import list_files
from distrain.storage.paths import RunPaths
from distrain.storage.retention import look_up
from distrain.system.pickling import pickled
from distrain.system.remote_path import RemotePath, own_temporary_path
from distrain.worker.job.unpicklable import describe_unpicklable
from distrain.worker.reporting.written_files import OWN_DIRECTORY

if TYPE_CHECKING:
    from distrain.api.context import TrainContext


def check_progress(progress: Sequence[float] | None) -> list[float] | None:
    """Return the step and the number of steps as JSON has them. Raises TypeError, ValueError."""
    if progress is None:
        return None
    problem = f"report(): progress must be the step and the number of steps, such as (300, 1000), got {progress!r:.80}"
    if not isinstance(progress, Sequence) or len(progress) != 2:
        raise TypeError(problem)
    try:
        step, total = (value.item() if hasattr(value, "item") else value for value in progress)
        if isinstance(step, str) or not 0 <= step <= total < math.inf:
            raise ValueError(problem)
    except TypeError as error:
        raise TypeError(problem) from error
    return [step, total]


def check_finite(body: bytes, metric: str | None) -> None:
    """Raise Rollback if a metric is not finite. ``body``: the metrics of a report as JSON."""
    value = look_up(json.loads(body), metric) if metric else None
    if isinstance(value, float) and not math.isfinite(value):
        raise Rollback(f"{metric} is {value}", skip_batch=True)


def check_checkpoint(checkpoint: Checkpoint | None, context: TrainContext) -> None:
    """Refuse what cannot be a checkpoint. Raises TypeError, CheckpointError."""
    if checkpoint is None:
        return
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"report(): checkpoint must be a distrain.Checkpoint, got {checkpoint!r:.80} "
            f"({type(checkpoint).__name__}); use Checkpoint.from_directory(path) or .from_dict(values)"
        )
    if not checkpoint.path or checkpoint.remote_path is not None:  # made from a dict, or remote
        return
    folder = os.path.realpath(checkpoint.path)
    if not checkpoint.exists():
        advice = ". Write its files before report(), and leave checkpoint= out on ranks that save nothing"
        raise CheckpointError(f"report(): {absence_of(checkpoint.path, advice)}")
    if folder == os.path.realpath(tempfile.gettempdir()):
        return  # only the files that the rank has written there are stored
    if folder in map(os.path.realpath, (os.path.expanduser("~"), os.sep)):
        raise CheckpointError(
            f"report(): {checkpoint.path} is a shared directory; the checkpoint would include everything in it. "
            f"{OWN_DIRECTORY}"
        )
    if isinstance(context.get_storage().run, RemotePath):
        return
    run = os.path.realpath(context.get_trial_dir())
    if os.path.commonpath([folder, run]) == folder:
        raise CheckpointError(
            f"report(): {checkpoint.path} contains the run directory {run}, and would be copied into itself. "
            f"{OWN_DIRECTORY}"
        )


def is_kept(checkpoint: Checkpoint, context: TrainContext) -> bool:
    """Return whether the checkpoint's directory must not be deleted after report().

    That is so if it is in a run directory, in a committed checkpoint or in a local copy of one, or if it contains a
    committed checkpoint or the working directory.
    """
    folder = Path(os.path.realpath(checkpoint.path))
    protected = [os.path.realpath(own_temporary_path())]
    if not isinstance(context.get_storage().run, RemotePath):
        protected.append(os.path.realpath(context.get_trial_dir()))
    around = (folder, *folder.parents)
    with contextlib.suppress(FileNotFoundError):  # somebody has deleted it
        if Path.cwd().is_relative_to(folder):
            return True
    return any(str(parent) in protected or (parent / MANIFEST_FILE).exists() for parent in around) or any(
        MANIFEST_FILE in files for _, _, files in os.walk(folder)
    )


def folder_in_place(checkpoint: Checkpoint, context: TrainContext) -> Path:
    """Return the path in the run directory of a checkpoint reported with NO_UPLOAD, without symlinks.

    Of a remote run directory, return the name of the checkpoint's directory only. Raises CheckpointError for files that
    no checkpoint can hold.
    """
    if checkpoint.remote_path is not None:
        return Path(checkpoint.remote_path.name)
    with contextlib.suppress(FileNotFoundError):  # other ranks still write there
        list_files(Path(checkpoint.path))
    return Path(context.get_trial_dir(), Path(os.path.realpath(checkpoint.path)).name)


def check_in_place(checkpoint: Checkpoint, context: TrainContext) -> None:
    """Refuse a checkpoint that cannot be reported with NO_UPLOAD. Raises ValueError."""
    remote, where = checkpoint.remote_path, context.get_storage().run
    if isinstance(where, RemotePath) or remote is not None:
        if remote is None or remote.path.rpartition("/")[0] != getattr(where, "path", ""):
            raise ValueError(_not_in_place(str(where), checkpoint.path))
        _check_name(remote.name)
        return
    check_sees_storage(context, "CheckpointUploadMode.NO_UPLOAD")
    folder = Path(os.path.realpath(checkpoint.path))
    run = Path(os.path.realpath(context.get_trial_dir()))
    if folder.parent != run:
        raise ValueError(_not_in_place(str(run), checkpoint.path))
    _check_name(folder.name)
    if (folder / MANIFEST_FILE).exists():
        raise ValueError(f"report(): {folder} is a committed checkpoint already")


def check_sees_storage(context: TrainContext, option: str) -> None:
    """Refuse an option for which this host has to see the run directory. Raises ValueError."""
    if not context.sees_storage:
        raise ValueError(
            f"report(): {option} needs the run directory {context.get_storage().run}, which this host does not see; "
            "leave it out: SYNC and ASYNC copy the files there"
        )


def _check_name(name: str) -> None:
    if (why_not := RunPaths(Path()).name_problem(name)) is not None:
        raise ValueError(f"report(): the name of a checkpoint's directory {why_not}")


def encoded_validation(
    options: StoreOptions, checkpoint: Checkpoint | None, context: TrainContext
) -> dict[str, Any] | None:
    """Return the field ``validation`` of :class:`~distrain.wire.Reported`. Raises TypeError, ValueError."""
    if options.validation is None:
        return None
    if checkpoint is None:
        raise ValueError("report(): validation needs a checkpoint: report(metrics, checkpoint=..., validation=...)")
    if options.mode is CheckpointUploadMode.MEMORY:
        raise ValueError("report(): validation needs a checkpoint on storage; leave out CheckpointUploadMode.MEMORY")
    if not context.validates:
        raise ValueError(
            "report(): validation needs a function: TorchTrainer(..., validation_config=ValidationConfig(fn))"
        )
    arguments = dict(options.validation.fn_kwargs or {})
    try:
        overrides = base64.b64encode(pickled(arguments)).decode()
    except Exception as error:
        culprit = describe_unpicklable(("ValidationTaskConfig.fn_kwargs", arguments))
        raise TypeError(
            f"report(): {culprit} cannot be pickled: {error}. The validation function runs in another process: make it "
            "there"
        ) from error
    return {"overrides": overrides, "timeout_s": options.validation.timeout_s}


def _not_in_place(run: str, path: str) -> str:
    return (
        f"report(): with CheckpointUploadMode.NO_UPLOAD the checkpoint must be a directory in the run directory {run} "
        f"(get_context().get_storage().build_checkpoint_path_from_name(...)), got {path}"
    )

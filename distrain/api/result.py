"""The result of a run. Runs in: coordinator, or anywhere later with :meth:`Result.from_path`."""

from __future__ import annotations

import math
import pickle
import warnings
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import TYPE_CHECKING, Any

from distrain.errors import ControllerError, StorageError, TrainingFailedError
from distrain.storage import names
from distrain.storage.checkpoint import Checkpoint
from distrain.storage.lines import last_record, read_file, read_metrics
from distrain.storage.paths import read_manifest
from distrain.storage.retention import Retention, best_first, flatten, score
from distrain.storage.runs.details import checkpoints_of, error_of
from distrain.storage.runs.listing import KILLED, run_at
from distrain.system.pickling import pickled
from distrain.system.remote_path import RemotePath, locate
from distrain.system.text import leaves

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

    import pandas
    from fsspec import AbstractFileSystem

    from distrain.storage.commit import CommittedCheckpoint


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run.

    metrics: the last report of rank 0, None if it never reported. If its checkpoint was validated, they include the
        metrics of the validation.
    checkpoint: the latest committed checkpoint, None if there is none.
    best_checkpoints: pairs of checkpoint and metrics that were kept, the best last (by score if the CheckpointConfig
        names one, else by time).
    path: the run directory, a path or URL.
    storage_filesystem: the filesystem of the path, if the user gave one instead of a URL.
    error: why training failed; ``fit()`` raises it.
    return_value: the return value of rank 0's train_func, None if it cannot be pickled.

    ::

        result = trainer.fit()
        print(result.metrics["loss"], result.checkpoint)
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    path: str
    error: TrainingFailedError | None = None
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = field(default_factory=list)
    return_value: Any = None
    storage_filesystem: AbstractFileSystem | None = field(default=None, repr=False)

    @property
    def metrics_dataframe(self) -> pandas.DataFrame | None:
        """Every report of rank 0 as a row, with nested metrics flattened with ``/``; None without reports.

        Integers of which some are missing are of type ``Int64``.

        Raises ImportError if pandas is not installed, OSError if the run directory cannot be read, ValueError if two
        metrics of a report get the same name.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("Result.metrics_dataframe needs pandas: pip install pandas") from None
        rows: list[dict[str, Any]] = []
        for record in read_metrics(self._run / names.METRICS):
            found = [name for name, _ in leaves(record["metrics"])]
            if len(found) > len({*found}):
                twice = next(name for name in found if found.count(name) > 1)
                raise ValueError(f"two metrics of a report are named {twice!r}: one in a dict, one with a '/'")
            rows.append(flatten(record["metrics"]))
        columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain.from_iterable(rows))}
        return pandas.DataFrame({name: _exact(column, pandas) for name, column in columns.items()}) if rows else None

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: AbstractFileSystem | None = None) -> Result:
        """Return the Result of an earlier run that has finished, has failed or is still running.

        It unpickles ``error`` and ``return_value``, so read only run directories that you trust. If the process that
        called fit() was killed, ``error`` is a ControllerError.

        path: a directory or a URL; with ``storage_filesystem`` (fsspec's or pyarrow's) a path on that filesystem.

        Raises StorageError if there is no run at ``path``, or if it cannot be read.
        """
        try:
            run = locate(path, storage_filesystem)
            manifest = read_manifest(run)
            if not manifest:
                raise StorageError(f"{run} is not a run directory: it has no {names.MANIFEST}")
            return make_result(
                run,
                checkpoints_of(run),
                _retention(run, manifest),
                last=last_record(run / names.METRICS),
                error=_stored_error(run) or _killed_error(run),
                return_value=_unpickle(run, names.RETURN_VALUE),
            )
        except OSError as error:
            raise StorageError(f"cannot read the run {path}: {error}") from error

    @property
    def _run(self) -> Path | RemotePath:
        return locate(self.path, self.storage_filesystem)

    @property
    def filesystem(self) -> AbstractFileSystem:
        """The filesystem of ``path``, as fsspec has it."""
        return Checkpoint(self.path, self.storage_filesystem).filesystem

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint:
        """Return the one of the ``best_checkpoints`` with the best value of a metric.

        metric: its name; ``"eval/loss"`` reads ``metrics["eval"]["loss"]``. NaN is never the best value.
        mode: ``"max"`` if the largest value is the best, ``"min"`` if the smallest is.

        Raises ValueError for another mode, RuntimeError if there is no checkpoint, or none with that metric.
        """
        if mode not in ("max", "min"):
            raise ValueError(f'get_best_checkpoint: mode must be "max" or "min", got {mode!r}')
        if not self.best_checkpoints:
            raise RuntimeError(f"there is no checkpoint in {self.path}")
        scored = [(score(metrics, metric, mode), checkpoint) for checkpoint, metrics in self.best_checkpoints]
        best, checkpoint = max(scored, key=lambda pair: pair[0])
        if best == -math.inf:
            known = ", ".join(sorted({name for _, metrics in self.best_checkpoints for name in flatten(metrics)}))
            raise RuntimeError(
                f"no checkpoint has a comparable value for metric {metric!r}; known metrics: {known or 'none'}"
            )
        return checkpoint

    def __repr__(self) -> str:
        lines = [f"path={self.path!r}", f"metrics={self.metrics!r}", f"checkpoint={self.checkpoint!r}"]
        if self.error is not None:
            lines.insert(0, f"error={type(self.error).__name__}")
        return "Result(\n  " + ",\n  ".join(lines) + "\n)"


_MOST_PICKLED = 1 << 30


def make_result(
    run: Path | RemotePath,
    committed: list[CommittedCheckpoint],
    config: Retention,
    *,
    last: dict[str, Any] | None,
    error: TrainingFailedError | None = None,
    return_value: Any = None,
) -> Result:
    """Make the Result of a run from its committed checkpoints, its retention settings, and the last line of rank 0."""
    order = best_first([saved.metrics for saved in committed], config)[: config.num_to_keep]
    return Result(
        metrics=_with_validation(last, committed),
        checkpoint=committed[-1].checkpoint if committed else None,
        path=str(run),
        error=error,
        best_checkpoints=[(committed[i].checkpoint, committed[i].metrics) for i in reversed(order)],
        return_value=return_value,
        storage_filesystem=run.given if isinstance(run, RemotePath) else None,
    )


def _stored_error(run: Path | RemotePath) -> TrainingFailedError | None:
    error, file = _unpickle(run, names.ERROR_PICKLE), run / names.ERROR_TEXT
    if error is None and file.exists():  # its class cannot be imported
        damage = f"the run failed, but {file}, which says why, cannot be read"
        return TrainingFailedError(str(error_of(run).get("message", damage)))
    return error if isinstance(error, TrainingFailedError) else None


def _retention(run: Path | RemotePath, manifest: Mapping[str, Any]) -> Retention:
    """Return the retention settings that the run has stored. Raises StorageError."""
    known = {each.name for each in fields(Retention)}
    stored = {name: value for name, value in manifest.get("checkpoint_config", {}).items() if name in known}
    try:
        return Retention(**stored)
    except (ValueError, TypeError) as error:
        raise StorageError(f"{run / names.MANIFEST} is damaged: {error}") from error


def _killed_error(run: Path | RemotePath) -> ControllerError | None:
    if run_at(run).state != KILLED:
        return None
    return ControllerError(
        "the process that called fit() was killed, or its machine crashed: "
        f"{run / names.MANIFEST} says that the run is running, but no process holds its lock. "
        "Start the run again under its name to continue at its last checkpoint"
    )


def _unpickle(run: Path | RemotePath, name: str) -> Any:
    """Return the object that a file has; None if there is no such file, or if that is not possible here."""
    body = None
    try:
        body = read_file(run / name, most=_MOST_PICKLED)
        return pickle.loads(body)  # noqa: S301 - documented
    except Exception as error:
        if body is not None or not isinstance(error, FileNotFoundError):
            warnings.warn(f"{run / name} cannot be unpickled in this process: {error!r}", stacklevel=3)
        return None


def pickle_or_none(value: object) -> bytes | None:
    """Return the pickled value, or None if it cannot be pickled."""
    try:
        return pickled(value)
    except Exception:
        return None


def _with_validation(last: dict[str, Any] | None, committed: list[CommittedCheckpoint]) -> dict[str, Any] | None:
    """Return the metrics of the last report, with those of the validation of its checkpoint."""
    if last is None:
        return None
    report = [last["attempt"], last["index"]]
    own = [(of.metrics, of.validation) for of in committed if of.validation and of.validation.get("report") == report]
    return {**last["metrics"], **{name: metrics[name] for metrics, of in own for name in of.get("metrics", ())}}


def _exact(values: list[Any], pandas: Any) -> Any:
    """Return values as a column, in which large integers keep their digits beside floats and gaps."""
    kinds, largest = {*map(type, values)}, max((abs(value) for value in values if type(value) is int), default=0)
    if kinds == {int, type(None)} and largest < 2**63:
        return pandas.Series(values, dtype="Int64")
    return pandas.Series(values, dtype=object if len(kinds) > 1 and largest > 2**53 else None)

"""What a run came to. Runs in: coordinator, or anywhere later with :meth:`Result.from_path`."""

from __future__ import annotations

import json
import math
import os
import pickle
import warnings
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from distrain.checkpoint import Checkpoint
from distrain.config import CheckpointConfig
from distrain.errors import StorageError, TrainingFailedError
from distrain.rounds import best_first, score
from distrain.storage import CommittedCheckpoint, RunPaths, checkpoint_metrics, read_manifest, read_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas
    from fsspec import AbstractFileSystem

__all__ = ["Result"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to.

    metrics: the last report of rank 0, None if it never reported.
    checkpoint: the latest committed checkpoint, None if there is none.
    best_checkpoints: pairs of checkpoint and metrics that were kept, the best last (by score if the CheckpointConfig
        names one, else by time).
    path: the run directory.
    error: why training failed; ``fit()`` raises it.
    return_value: what rank 0's train_func returned.
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    path: str
    error: TrainingFailedError | None = None
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = field(default_factory=list)
    return_value: Any = None

    @property
    def metrics_dataframe(self) -> pandas.DataFrame | None:
        """Every report of rank 0 as a row, nested metrics flattened with ``/``; None without reports.

        Raises ImportError if pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("Result.metrics_dataframe needs pandas: pip install pandas") from None
        rows = [_flat(record["metrics"]) for record in read_metrics(RunPaths(Path(self.path)))]
        return pandas.DataFrame(rows) if rows else None

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Result:
        """The Result of an earlier run, finished, failed or still running; ``error`` and ``return_value`` included.

        Unpickles both: read only run directories that you trust. Raises StorageError if there is no run at ``path``.
        """
        paths = RunPaths(Path(os.path.abspath(Path(path).expanduser())))
        manifest = read_manifest(paths.root)
        if not manifest:
            raise StorageError(f"{paths.root} is not a run directory: it has no {paths.manifest.name}")
        metrics = None
        for record in read_metrics(paths):
            metrics = record["metrics"]
        committed = list(_readable(paths))
        return make_result(
            paths,
            committed,
            CheckpointConfig(**manifest.get("checkpoint_config", {})),
            metrics=metrics,
            error=_stored_error(paths),
            return_value=_unpickle(paths.return_value),
        )

    @property
    def filesystem(self) -> AbstractFileSystem:
        """Where ``path`` is."""
        import fsspec

        return fsspec.filesystem("file")

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint:
        """Of the ``best_checkpoints``, the one with the largest (``mode="max"``) or smallest (``"min"``) metric;
        ``"eval/loss"`` reads ``metrics["eval"]["loss"]``. NaN is never the best.

        Raises ValueError for another mode, RuntimeError if there is no checkpoint, or none with that metric.
        """
        if mode not in ("max", "min"):
            raise ValueError(f'get_best_checkpoint: mode must be "max" or "min", got {mode!r}')
        if not self.best_checkpoints:
            raise RuntimeError(f"there is no checkpoint in {self.path}")
        scored = [(score(metrics, metric, mode), checkpoint) for checkpoint, metrics in self.best_checkpoints]
        best, checkpoint = max(scored, key=lambda pair: pair[0])
        if best == -math.inf:
            known = sorted({name for _, metrics in self.best_checkpoints for name in _flat(metrics)})
            raise RuntimeError(f"no checkpoint has a metric {metric!r}; there are {', '.join(known) or 'none'}")
        return checkpoint

    def __repr__(self) -> str:
        lines = [f"path={self.path!r}", f"metrics={self.metrics!r}", f"checkpoint={self.checkpoint!r}"]
        if self.error is not None:
            lines.insert(0, f"error={type(self.error).__name__}")
        return "Result(\n  " + ",\n  ".join(lines) + "\n)"

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows: dict[str, Any] = {} if self.error is None else {"error": self.error}
        rows |= {"path": self.path, "checkpoint": self.checkpoint, **_flat(self.metrics or {})}
        cells = (f"<tr><th>{escape(n)}</th><td><pre>{escape(str(value))}</pre></td></tr>" for n, value in rows.items())
        return f"<table>{''.join(cells)}</table>"


def _readable(paths: RunPaths) -> Iterator[CommittedCheckpoint]:
    for folder in paths.checkpoints():
        try:
            yield CommittedCheckpoint(folder, checkpoint_metrics(folder))
        except StorageError as error:
            warnings.warn(f"passed over: {error}", stacklevel=3)


def make_result(
    paths: RunPaths,
    committed: list[CommittedCheckpoint],
    config: CheckpointConfig,
    *,
    metrics: dict[str, Any] | None,
    error: TrainingFailedError | None = None,
    return_value: Any = None,
) -> Result:
    """A Result from what the store knows."""
    order = best_first([checkpoint.metrics for checkpoint in committed], config)[: config.num_to_keep]
    best = [(Checkpoint(committed[i].path), committed[i].metrics) for i in reversed(order)]
    return Result(
        metrics=metrics,
        checkpoint=Checkpoint(committed[-1].path) if committed else None,
        path=str(paths.root),
        error=error,
        best_checkpoints=best,
        return_value=return_value,
    )


def _stored_error(paths: RunPaths) -> TrainingFailedError | None:
    error = _unpickle(paths.error_pickle)
    if error is None and paths.error_text.exists():  # of a class that is not to be had here
        return TrainingFailedError(json.loads(paths.error_text.read_text())["message"])
    return error if isinstance(error, TrainingFailedError) else None


def _unpickle(path: Path) -> Any:
    try:
        return pickle.loads(path.read_bytes())  # noqa: S301 - documented
    except FileNotFoundError:
        return None
    except Exception as error:
        warnings.warn(f"{path} cannot be unpickled in this process: {error!r}", stacklevel=3)
        return None


def pickle_or_none(value: object) -> bytes | None:
    """Best effort, for what is nice to keep."""
    try:
        blob: bytes = cloudpickle.dumps(value)
    except Exception:
        return None
    return blob


def _flat(metrics: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in metrics.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat

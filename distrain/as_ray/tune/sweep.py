"""The trials of ``ray.tune.Tuner``, each a run in a directory of its own; and their results. Runs in: coordinator.

The directory of a sweep has a file with the configs of its trials, so that a sweep that was interrupted goes on with
those that have not ended. What became of a trial is in the directory of its run.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from distrain.api.result import Result
from distrain.as_ray.tune.search_space import flat
from distrain.errors import StorageError, TrainingFailedError
from distrain.storage import names
from distrain.storage.files import write_atomically
from distrain.storage.paths import new_name, read_manifest
from distrain.storage.records import read_metrics
from distrain.storage.runs.listing import FAILED, FINISHED
from distrain.system.log import say
from distrain.system.pickling import pickled
from distrain.system.remote_path import RemotePath, locate

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    import pandas

_FILE = "trials.pkl"
_SCOPES = ("last", "all", "avg", "last-5-avg", "last-10-avg")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One config, and the directory of its run.

    label: what is special about its config, for a line on the console.
    """

    config: dict[str, Any]
    label: str
    location: Path | RemotePath

    @property
    def name(self) -> str:
        return self.location.name

    @property
    def status(self) -> str:
        """The status in its run.json; empty if it has not begun."""
        return str(read_manifest(self.location).get("status", ""))

    @property
    def has_ended(self) -> bool:
        """True if it has finished or failed, not if it was stopped."""
        return self.status in (FINISHED, FAILED)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The trials of a directory.

    settings: what else its Tuner has been given, for one that is restored.
    """

    location: Path | RemotePath
    trials: list[Trial]
    settings: Any

    @classmethod
    def open(
        cls,
        storage_path: str | os.PathLike[str] | None,
        name: str | None,
        filesystem: Any,
        *,
        stem: str,
        space: str,
        settings: Any,
        make_configs: Callable[[], list[dict[str, Any]]],
    ) -> Sweep:
        """Return the unfinished sweep of that name, else a new one, whose name may get a number.

        space: the search space as text. Raises StorageError if the unfinished sweep has another one.
        """
        storage = locate(names.DEFAULT_STORAGE if storage_path is None else storage_path, filesystem)
        given, number = name or new_name(stem), 1
        location = storage / given
        while (stored := _stored(location)) is not None:
            sweep = cls._of(location, stored)
            if not all(trial.has_ended for trial in sweep.trials):
                if stored["space"] != space:
                    raise StorageError(
                        f"{location} is an unfinished sweep with another param_space or num_samples: give the new one "
                        "another name, or continue the old one with its own"
                    )
                ended = sum(trial.has_ended for trial in sweep.trials)
                say(f"continuing the unfinished sweep {location}: {ended} of {len(sweep.trials)} trials have ended")
                return sweep
            number += 1
            location = storage / f"{given}-{number}"
        stored = {"space": space, "stem": stem, "configs": make_configs(), "settings": settings}
        if isinstance(location, RemotePath):
            (location / _FILE).write_bytes(pickled(stored))
        else:
            location.mkdir(parents=True, exist_ok=True)
            write_atomically(location / _FILE, pickled(stored))
        return cls._of(location, stored)

    @classmethod
    def at(cls, path: str | os.PathLike[str], filesystem: Any = None) -> Sweep:
        """Return the sweep of a directory. Raises StorageError if there is none."""
        location = locate(path, filesystem)
        if (stored := _stored(location)) is None:
            raise StorageError(f"{location} is not the directory of a sweep: it has no {_FILE}")
        return cls._of(location, stored)

    @classmethod
    def _of(cls, location: Path | RemotePath, stored: dict[str, Any]) -> Sweep:
        pairs = enumerate(zip(stored["configs"], _labels(stored["configs"]), strict=True))
        trials = [
            Trial(config=config, label=label, location=location / f"{stored['stem']}_{i:05d}")
            for i, (config, label) in pairs
        ]
        return cls(location=location, trials=trials, settings=stored["settings"])

    def results(self, metric: str | None, mode: str | None) -> ResultGrid:
        """Return what became of the trials."""
        return ResultGrid([TrialResult.of(trial) for trial in self.trials], self.location, metric, mode)


def _labels(configs: list[dict[str, Any]]) -> list[str]:
    """Return the values of each config that are not the same in all."""
    flats = [{path: _shown(value) for path, value in flat(config).items()} for config in configs]
    common = set.intersection(*(set(one.items()) for one in flats)) if len(flats) > 1 else set()
    return [", ".join(f"{path}={text}" for path, text in one.items() if (path, text) not in common) for one in flats]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value!r:.40}"


def _stored(location: Path | RemotePath) -> dict[str, Any] | None:
    try:
        stored: dict[str, Any] = pickle.loads((location / _FILE).read_bytes())  # noqa: S301 - as error.pkl
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:
        raise StorageError(f"{location / _FILE} cannot be read: {error!r}") from error
    return stored


# -- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class TrialResult(Result):
    """The result of a trial, with its config. Its metrics include some that Ray Tune adds."""

    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, trial: Trial) -> TrialResult:
        """Read the result of a trial; an empty one with an error if it has not begun."""
        manifest = read_manifest(trial.location)
        if not manifest:
            result = Result(metrics=None, checkpoint=None, path=str(trial.location), error=_not_begun(trial))
        else:
            result = Result.from_path(
                str(trial.location), trial.location.given if isinstance(trial.location, RemotePath) else None
            )
        values = {each.name: getattr(result, each.name) for each in fields(Result)}
        began, ended = manifest.get("started", 0.0), manifest.get("updated", 0.0)
        metrics = {
            "training_iteration": sum(1 for _ in read_metrics(trial.location / names.METRICS)) if manifest else 0,
            "trial_id": manifest.get("run_id", trial.name),
            "time_total_s": ended - began,
            "timestamp": int(ended),
            "done": trial.has_ended,
            **(result.metrics or {}),
            "config": trial.config,
        }
        return cls(**{**values, "metrics": metrics}, config=trial.config)

    @property
    def metrics_dataframe(self) -> pandas.DataFrame | None:
        """Every report of rank 0 as a row, numbered by ``training_iteration``."""
        frame = super().metrics_dataframe
        if frame is not None and "training_iteration" not in frame:
            frame["training_iteration"] = range(1, len(frame) + 1)
        return frame

    def history(self, metric: str) -> list[float]:
        """Return the values of a metric that were reported, oldest first."""
        rows = [flat(record["metrics"]) for record in read_metrics(self._run / names.METRICS)] if self.has_run else []
        return [float(row[metric]) for row in rows if isinstance(row.get(metric), (int, float))]

    @property
    def has_run(self) -> bool:
        """True if the trial has begun."""
        return bool(read_manifest(self._run))


def _not_begun(trial: Trial) -> TrainingFailedError:
    return TrainingFailedError(f"the trial {trial.name} has not begun; start the sweep again under its name")


class ResultGrid(Sequence[TrialResult]):
    """The results of all trials, in the order of their configs."""

    def __init__(
        self, results: list[TrialResult], location: Path | RemotePath, metric: str | None, mode: str | None
    ) -> None:
        self._results = results
        self._location = location
        self._metric = metric
        self._mode = mode

    def __len__(self) -> int:
        return len(self._results)

    def __getitem__(self, index: Any) -> Any:
        return self._results[index]

    def __iter__(self) -> Iterator[TrialResult]:
        return iter(self._results)

    def __repr__(self) -> str:
        text = ",\n".join(map(repr, self._results))
        return f"ResultGrid<[\n{text}\n]>"

    @property
    def experiment_path(self) -> str:
        """The directory of the sweep, a path or URL."""
        return str(self._location)

    @property
    def filesystem(self) -> Any:
        """The filesystem of that directory, as fsspec has it."""
        return self._results[0].filesystem

    @property
    def errors(self) -> list[TrainingFailedError]:
        """The errors of the trials that have failed."""
        return [result.error for result in self._results if result.error is not None]

    @property
    def num_errors(self) -> int:
        """The number of trials that have failed."""
        return len(self.errors)

    @property
    def num_terminated(self) -> int:
        """The number of trials that have finished."""
        return len(self) - self.num_errors

    def get_best_result(
        self,
        metric: str | None = None,
        mode: str | None = None,
        scope: str = "last",
        filter_nan_and_inf: bool = True,
    ) -> TrialResult:
        """Return the result with the best value of a metric, the only one if there is one trial.

        metric, mode: by default those of the TuneConfig. scope: which of its values counts, the last one, the best of
            all, or an average of all, or of the last 5 or 10.

        Raises ValueError without a metric or mode, RuntimeError if no trial has reported the metric.
        """
        if len(self) == 1:
            return self._results[0]
        metric, mode = metric or self._metric, mode or self._mode
        for name, value in (("metric", metric), ("mode", mode)):
            if not value:
                raise ValueError(
                    f"get_best_result() needs a {name}: pass {name}=..., or TuneConfig({name}=...) to the Tuner"
                )
        if mode not in ("min", "max") or scope not in _SCOPES:
            raise ValueError(f"mode must be min or max, scope one of {', '.join(_SCOPES)}; got {mode!r}, {scope!r}")
        scored = [(self._value(result, str(metric), mode, scope), result) for result in self._results]
        usable = [pair for pair in scored if pair[0] is not None and (not filter_nan_and_inf or math.isfinite(pair[0]))]
        if not usable:
            known = sorted({name for result in self._results for name in flat(result.metrics or {})})
            raise RuntimeError(
                f"no trial has reported the metric {metric!r}, or only NaN or infinite values; known metrics: "
                f"{', '.join(known)}"
            )
        return (min if mode == "min" else max)(usable, key=lambda pair: pair[0])[1]

    @staticmethod
    def _value(result: TrialResult, metric: str, mode: str, scope: str) -> Any:
        if scope == "last":
            value = flat(result.metrics or {}).get(metric)
            return value if isinstance(value, (int, float)) else None
        values = result.history(metric)
        if scope.startswith("last-"):
            values = values[-int(scope.split("-")[1]) :]
        if not values:
            return None
        return (min if mode == "min" else max)(values) if scope == "all" else sum(values) / len(values)

    def get_dataframe(self, filter_metric: str | None = None, filter_mode: str | None = None) -> pandas.DataFrame:
        """Return a row for each trial: its last metrics, or those of its best report, its config, and its directory."""
        import pandas

        return pandas.DataFrame([self._row(result, filter_metric, filter_mode) for result in self._results])

    @staticmethod
    def _row(result: TrialResult, metric: str | None, mode: str | None) -> dict[str, Any]:
        metrics = {name: value for name, value in (result.metrics or {}).items() if name != "config"}
        frame = result.metrics_dataframe if metric is not None and result.has_run else None
        if frame is not None and metric in frame:
            best = frame[metric].idxmax() if mode == "max" else frame[metric].idxmin()
            metrics |= frame.loc[best].to_dict()
        return {**flat(metrics), **flat({"config": result.config}), "logdir": result.path}

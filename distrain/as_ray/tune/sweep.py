"""The trials of ``ray.tune.Tuner``, each a run in a directory of its own; and their results. Runs in: coordinator.

The directory of a sweep has a file with the configs of its trials, so that a sweep that was interrupted continues with
those that have not ended. What became of a trial is in the directory of its run.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.api.result import Result
from distrain.errors import StorageError, TrainingFailedError
from distrain.storage import names
from distrain.storage.files import write_atomically
from distrain.storage.lines import read_file
from distrain.storage.paths import new_name, read_manifest
from distrain.storage.records import read_metrics
from distrain.storage.runs.listing import FAILED, FINISHED
from distrain.system.log import say
from distrain.system.pickling import pickled
from distrain.system.remote_path import RemotePath, locate
from distrain.system.text import flatten

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pandas

    from distrain.api.config import RunConfig

_FILE = "trials.pkl"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One config, and the directory of its run.

    label: what is special about its config, for a line on the console.
    """

    config: dict[str, Any]
    label: str
    location: Path | RemotePath

    @property
    def has_ended(self) -> bool:
        """True if it has finished or failed, not if it was stopped."""
        return read_manifest(self.location).get("status") in (FINISHED, FAILED)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The trials of a directory."""

    location: Path | RemotePath
    trials: list[Trial]

    @classmethod
    def open(cls, run: RunConfig, stem: str, space: str, make_configs: Callable[[], list[dict[str, Any]]]) -> Sweep:
        """Return the unfinished sweep of the run's name, else a new one, whose name may get a number.

        space: the search space as text. Raises StorageError if the unfinished sweep has another one.
        """
        path = names.DEFAULT_STORAGE if run.storage_path is None else run.storage_path
        storage = locate(path, run.storage_filesystem)
        for location in (storage / name for name in names.numbered(run.name or new_name(stem))):
            if (stored := _stored(location)) is None:
                break
            sweep = cls._of(location, stored)
            ended = sum(trial.has_ended for trial in sweep.trials)
            if ended < len(sweep.trials):
                if stored["space"] != space:
                    raise StorageError(
                        f"{location} is an unfinished sweep with another param_space or num_samples: give the new one "
                        "another name, or continue the old one with its own"
                    )
                say(f"continuing the unfinished sweep {location}: {ended} of {len(sweep.trials)} trials have ended")
                return sweep
        stored = {"space": space, "stem": stem, "configs": make_configs()}
        if isinstance(location, RemotePath):
            (location / _FILE).write_bytes(pickled(stored))
        else:
            location.mkdir(parents=True, exist_ok=True)
            write_atomically(location / _FILE, pickled(stored))
        return cls._of(location, stored)

    @classmethod
    def _of(cls, location: Path | RemotePath, stored: dict[str, Any]) -> Sweep:
        pairs = enumerate(zip(stored["configs"], _labels(stored["configs"]), strict=True))
        trials = [
            Trial(config=config, label=label, location=location / f"{stored['stem']}_{i:05d}")
            for i, (config, label) in pairs
        ]
        return cls(location=location, trials=trials)


def _labels(configs: list[dict[str, Any]]) -> list[str]:
    """Return the values of each config that are not the same in all."""
    flats = [{path: _shown(value) for path, value in flatten(config).items()} for config in configs]
    common = set.intersection(*(set(one.items()) for one in flats)) if len(flats) > 1 else set()
    return [", ".join(f"{path}={text}" for path, text in one.items() if (path, text) not in common) for one in flats]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value!r:.40}"


def _stored(location: Path | RemotePath) -> dict[str, Any] | None:
    try:
        stored: dict[str, Any] = pickle.loads(read_file(location / _FILE, most=1 << 30))  # noqa: S301 - as error.pkl
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
        if manifest:
            filesystem = trial.location.given if isinstance(trial.location, RemotePath) else None
            result = Result.from_path(str(trial.location), filesystem)
        else:
            error = TrainingFailedError(f"the trial {trial.location.name} has not begun; start the sweep again")
            result = Result(metrics=None, checkpoint=None, path=str(trial.location), error=error)
        began, ended = manifest.get("started", 0.0), manifest.get("updated", 0.0)
        metrics = {
            "training_iteration": sum(1 for _ in read_metrics(trial.location / names.METRICS)) if manifest else 0,
            "trial_id": manifest.get("run_id", trial.location.name),
            "time_total_s": ended - began,
            "done": trial.has_ended,
            **(result.metrics or {}),
            "config": trial.config,
        }
        return cls(**{**vars(result), "metrics": metrics}, config=trial.config)


class ResultGrid(Sequence[TrialResult]):
    """The results of all trials, in the order of their configs."""

    def __init__(self, sweep: Sweep, metric: str | None, mode: str | None) -> None:
        self._results = [TrialResult.of(trial) for trial in sweep.trials]
        self._metric = metric
        self._mode = mode
        self.experiment_path = str(sweep.location)

    def __len__(self) -> int:
        return len(self._results)

    def __getitem__(self, index: Any) -> Any:
        return self._results[index]

    def __repr__(self) -> str:
        return f"ResultGrid({self._results!r})"

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

    def get_best_result(self, metric: str | None = None, mode: str | None = None, scope: str = "last") -> TrialResult:
        """Return the result with the best last value of a metric, the only one if there is one trial.

        metric, mode: by default those of the TuneConfig.

        Raises ValueError without a metric or mode, RuntimeError if no trial has reported the metric.
        """
        if scope != "last":
            raise ValueError(f"get_best_result(scope={scope!r}): only 'last'; compare result.metrics_dataframe instead")
        if len(self) == 1:
            return self._results[0]
        metric, mode = metric or self._metric, mode or self._mode
        if metric is None or mode not in ("min", "max"):
            raise ValueError(
                "get_best_result() needs a metric, and a mode, which is min or max: pass them, or "
                f"TuneConfig(metric=..., mode=...) to the Tuner; got {metric!r}, {mode!r}"
            )
        flats = [flatten(result.metrics or {}) for result in self._results]
        scored = [(flat[metric], one) for flat, one in zip(flats, self._results, strict=True) if metric in flat]
        usable = [pair for pair in scored if isinstance(pair[0], (int, float)) and math.isfinite(pair[0])]
        if not usable:
            raise RuntimeError(
                f"no trial has reported the metric {metric!r}, or only NaN or infinite values; known metrics: "
                f"{', '.join(sorted({name for flat in flats for name in flat}))}"
            )
        return (min if mode == "min" else max)(usable, key=lambda pair: pair[0])[1]

    def get_dataframe(self) -> pandas.DataFrame:
        """Return a row for each trial: its last metrics, its config, and its directory."""
        import pandas

        return pandas.DataFrame([{**flatten(result.metrics or {}), "logdir": result.path} for result in self._results])

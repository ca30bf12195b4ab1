"""``ray.tune.Tuner``: grid search and random search, with a run for every trial, one after the other.

A sweep that was interrupted continues with the trials that have not ended. What became of a trial is in the directory
of its run, whose name follows from its config. Runs in: coordinator, and worker.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import distrain
from distrain.api.ray_names import checks_arguments
from distrain.as_ray.constants import WithoutEffect
from distrain.as_ray.sentences import OPTUNA
from distrain.as_ray.tune.search_space import configs
from distrain.storage import names
from distrain.storage.lines import read_metrics
from distrain.storage.paths import new_name, read_manifest
from distrain.storage.retention import score
from distrain.storage.runs.listing import FAILED, FINISHED
from distrain.system.arguments import check_int, check_type
from distrain.system.log import say, warn
from distrain.system.remote_path import RemotePath, locate
from distrain.system.text import count, flatten
from distrain.worker.session import session_of

if TYPE_CHECKING:
    from pathlib import Path

    import pandas

    from distrain.storage.checkpoint import Checkpoint

_UNIQUE = re.compile(r"0x[0-9a-f]+")
"""Parts of a repr that another process has differently."""


# -- in a trial ------------------------------------------------------------------------------------------------------


def report(metrics: Mapping[str, Any] | None = None, *, checkpoint: Checkpoint | None = None, **named: Any) -> None:
    """Report metrics of a trial. Earlier versions of Ray take them as keyword arguments."""
    distrain.report({**(metrics or {}), **named}, checkpoint=checkpoint)


def with_parameters(trainable: Callable[..., Any], **parameters: Any) -> Callable[..., Any]:
    """Return the function with some of its arguments."""
    return functools.update_wrapper(functools.partial(trainable, **parameters), trainable)


def with_resources(trainable: Callable[..., Any], resources: Mapping[str, float]) -> Callable[..., Any]:
    """Return the function with the resources of a trial, as ``{"cpu": 2, "gpu": 1}``."""
    check_type("with_resources(resources)", resources, Mapping)
    function = with_parameters(trainable)
    vars(function)["resources"] = {{"cpu": "CPU", "gpu": "GPU"}.get(name, name): resources[name] for name in resources}
    return function


class TuneReportCallback(distrain.UserCallback):
    """``ray.tune.integration.ray_train``: reports of a run that a trial starts become reports of the trial."""

    def after_report(self, run_context: Any, metrics: list[dict[str, Any] | None], checkpoint: Any) -> None:
        """Report the metrics of rank 0."""
        path = {} if checkpoint is None else {"checkpoint_path": checkpoint.path}
        distrain.report({**(metrics[0] or {}), **path})


class _EnoughError(BaseException):
    """Ends the function of a trial. Not an Exception, which the function may catch."""


@dataclass(frozen=True)
class _Function:
    """The function of a trial, as a train_func: what it returns is reported, too."""

    trainable: Callable[..., Any]
    stop: Mapping[str, float]

    def __call__(self, config: dict[str, Any]) -> Any:
        """Run the trial in this worker, up to the report after which it should stop."""
        session = session_of("report")
        record, numbers = session.report, itertools.count(1)

        def record_and_stop(metrics: Mapping[str, Any], *args: Any, **named: Any) -> None:
            record(metrics, *args, **named)
            values = flatten({"training_iteration": next(numbers), **metrics})
            if any(values.get(name, -math.inf) >= limit for name, limit in self.stop.items()):
                raise _EnoughError

        session.report = record_and_stop  # type: ignore[method-assign]
        try:
            value = self.trainable(config)
        except _EnoughError:
            return None
        if isinstance(value, Mapping):
            distrain.report(value)
        return value


# -- settings --------------------------------------------------------------------------------------------------------


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class RunConfig(distrain.RunConfig):
    """``RunConfig`` of Ray, which has one more field.

    stop: ends a trial after the report in which one of these metrics has reached its value.
    """

    stop: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("RunConfig.stop", self.stop, Mapping, optional=True)


@dataclass(frozen=True)
class TuneConfig:
    """Settings of a sweep: ``Tuner(tune_config=...)``.

    metric, mode: the defaults of ``ResultGrid.get_best_result()``.
    search_alg: Ray's default, whose ``random_state`` is a seed.
    scheduler: Ray's default.
    num_samples: how often the search space is sampled, each time with all combinations of its grids.
    max_concurrent_trials, reuse_actors: no effect because trials run one after the other.
    """

    metric: str | None = None
    mode: str | None = None
    search_alg: Any = None
    scheduler: Any = None
    num_samples: int = 1
    max_concurrent_trials: int | None = None
    time_budget_s: float | None = None
    reuse_actors: bool = False

    def __post_init__(self) -> None:
        check_int("TuneConfig.num_samples", self.num_samples, minimum=1)
        for name in ("search_alg", "scheduler", "time_budget_s"):
            if not isinstance(getattr(self, name), (WithoutEffect, type(None))):
                raise TypeError(f"TuneConfig({name}=...) is not supported: every trial runs to its end; {OPTUNA}")


# -- the tuner -------------------------------------------------------------------------------------------------------


class Tuner:
    """Run a trial for every config of a search space.

    trainable: a function that takes the config, and reports or returns metrics; or a trainer, whose ``param_space`` has
        the keys ``train_loop_config`` and ``scaling_config``.
    param_space: the config, with grids and domains of ``ray.tune`` anywhere in it.
    run_config: name and storage path of the sweep, and the settings of every trial.

    ::

        tuner = Tuner(train_func, param_space={"lr": tune.grid_search([0.1, 0.01])})
        print(tuner.fit().get_best_result("loss", "min").config)
    """

    def __init__(
        self, trainable: Any, *, param_space: Any = None, tune_config: TuneConfig | None = None, run_config: Any = None
    ) -> None:
        self._is_function = not isinstance(trainable, distrain.DataParallelTrainer)
        self._space = dict(param_space or {})
        self._tune = tune_config or TuneConfig()
        self._name = re.sub(r"[^\w-]", "", getattr(trainable, "__name__", type(trainable).__name__))
        if self._is_function:
            self._run = run_config or RunConfig()
            self._trainer = _trainer_of(trainable, getattr(self._run, "stop", None) or {})
            return
        self._run = run_config or trainable._run
        self._trainer = trainable
        if unknown := self._space.keys() - {"train_loop_config", "scaling_config"}:
            raise ValueError(
                f"Tuner(param_space) of a trainer has 'train_loop_config' and 'scaling_config', not {min(unknown)!r}"
            )
        if getattr(self._run, "stop", None):
            raise TypeError("RunConfig(stop=...) is not for trainers: exit the loop in train_func instead")

    @classmethod
    def restore(cls, path: Any, *args: Any, **options: Any) -> None:
        """Raise TypeError that says how to continue a sweep."""
        raise TypeError(
            f"Tuner.restore({str(path)!r}) is not needed: make the Tuner as before, with the same RunConfig(name=..., "
            "storage_path=...); fit() continues an unfinished sweep of that name"
        )

    @classmethod
    def can_restore(cls, path: Any, **options: Any) -> bool:
        """Return False: a new Tuner of the same name continues an unfinished sweep."""
        return False

    def fit(self) -> ResultGrid:
        """Run all trials that have not ended, and return the results of all. The errors of trials are in these.

        Raises StorageError, ResourcesError or JobError if a trial could not begin; KeyboardInterrupt after Ctrl-C, and
        PreemptionError after SIGTERM, once no process of the trial is left.
        """
        location, trials = self._open()
        ended = sum(map(_has_ended, trials))
        say(f"sweep of {count(len(trials), 'trial')}, of which {ended} have ended; directory {location}")
        for number, (trial, settings) in enumerate(trials.items(), 1):
            if _has_ended(trial):
                continue
            say(f"trial {number} of {len(trials)}: {settings!r:.200}")
            try:
                self._fit(settings, replace(self._run, name=trial.name, storage_path=str(location)))
            except (KeyboardInterrupt, distrain.PreemptionError):
                say(f"stopped; a Tuner of RunConfig(name={location.name!r}) continues with the other trials")
                raise
            except distrain.TrainingFailedError as error:
                if not read_manifest(trial):
                    raise
                warn(f"trial {trial.name} has failed: {error}".partition("\n")[0])
        results = [TrialResult.of(trial, settings) for trial, settings in trials.items()]
        return ResultGrid(results, str(location), self._tune.metric, self._tune.mode)

    def _open(self) -> tuple[Path | RemotePath, dict[Path | RemotePath, dict[str, Any]]]:
        """Return the directory of the unfinished sweep of the run's name, else a new one; and its trials.

        A directory has the same random configs each time, and a trial's name has a digest of its config.
        """
        path = names.DEFAULT_STORAGE if self._run.storage_path is None else self._run.storage_path
        storage = locate(path, self._run.storage_filesystem)
        seed = getattr(self._tune.search_alg, "random_state", None)
        for name in names.numbered(self._run.name or new_name(self._name)):
            generator = random.Random(name if seed is None else seed)  # noqa: S311 - not a secret
            found = [one for _ in range(self._tune.num_samples) for one in configs(self._space, generator)]
            stems = (f"{self._name}_{place:05d}_{_digest(one)}" for place, one in enumerate(found))
            trials = dict(zip((storage / name / stem for stem in stems), found, strict=True))
            if not trials or not all(map(_has_ended, trials)):
                break
        return storage / name, trials

    def _fit(self, settings: dict[str, Any], run: distrain.RunConfig) -> None:
        """Run a trial."""
        parts = {"train_loop_config": settings} if self._is_function else settings
        scaling = parts.get("scaling_config")
        scaling = distrain.ScalingConfig(**scaling) if isinstance(scaling, Mapping) else scaling
        self._trainer._for_trial(parts.get("train_loop_config", {}), scaling, run).fit()


def _trainer_of(trainable: Callable[..., Any], stop: Mapping[str, float]) -> distrain.DataParallelTrainer:
    """Return a trainer that calls the function of a trial in one worker. Raises TypeError for other trainables."""
    if not callable(trainable) or inspect.isclass(trainable):
        raise TypeError(f"Tuner() takes a function or a trainer, got {trainable!r}")
    needs = {name: amount for name, amount in getattr(trainable, "resources", {}).items() if amount}
    scaling = distrain.ScalingConfig(num_workers=1, use_gpu="GPU" in needs, resources_per_worker=needs or None)
    return distrain.DataParallelTrainer(_Function(trainable, stop), scaling_config=scaling)


def _digest(settings: dict[str, Any]) -> str:
    return sha256(_UNIQUE.sub("", repr(settings)).encode()).hexdigest()[:8]


def _has_ended(trial: Path | RemotePath) -> bool:
    """Tell if a trial has finished or failed, and was not stopped."""
    return read_manifest(trial).get("status") in (FINISHED, FAILED)


# -- results ---------------------------------------------------------------------------------------------------------


class TrialResult(distrain.Result):
    """The result of a trial. Its metrics include some that Ray Tune adds."""

    @classmethod
    def of(cls, trial: Path | RemotePath, settings: dict[str, Any]) -> TrialResult:
        """Read the result of a trial that has ended."""
        result = cls.from_path(str(trial), trial.given if isinstance(trial, RemotePath) else None)
        manifest = read_manifest(trial)
        added = {
            "training_iteration": sum(1 for _ in read_metrics(trial / names.METRICS)),
            "trial_id": manifest["run_id"],
            "time_total_s": manifest["updated"] - manifest["started"],
            "config": settings,
        }
        return cls(**{**vars(result), "metrics": {**added, **(result.metrics or {})}})

    @property
    def config(self) -> Any:
        """The config of the trial."""
        return (self.metrics or {})["config"]


class ResultGrid(list[TrialResult]):
    """The results of all trials, in the order of their configs."""

    def __init__(self, results: list[TrialResult], path: str, metric: str | None, mode: str | None) -> None:
        super().__init__(results)
        self._defaults = metric, mode
        self.experiment_path = path
        self.errors = [result.error for result in results if result.error is not None]
        self.num_errors = len(self.errors)
        self.num_terminated = len(results) - self.num_errors

    def get_best_result(self, metric: str | None = None, mode: str | None = None) -> TrialResult:
        """Return the result with the best last value of a metric, the only one if there is one trial.

        metric, mode: by default those of the TuneConfig.

        Raises ValueError without a metric or mode, RuntimeError if no trial has reported the metric.
        """
        if len(self) == 1:
            return self[0]
        metric, mode = metric or self._defaults[0], mode or self._defaults[1]
        if metric is None or mode not in ("min", "max"):
            raise ValueError(f"get_best_result() needs a metric, and a mode, min or max; got {metric!r}, {mode!r}")
        best = max(self, key=lambda result: score(result.metrics or {}, metric, mode))
        if score(best.metrics or {}, metric, mode) == -math.inf:
            raise RuntimeError(f"no trial has reported the metric {metric!r}, or only NaN or infinite values")
        return best

    def get_dataframe(self) -> pandas.DataFrame:
        """Return a row for each trial: its last metrics, its config, and its directory."""
        import pandas

        return pandas.DataFrame([{**flatten(result.metrics or {}), "logdir": result.path} for result in self])

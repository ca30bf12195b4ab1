"""``ray.tune.Tuner``: grid search and random search, whose trials are runs. Runs in: coordinator.

Trials run one after the other, or side by side if the machine has CPUs and GPUs for several. Then each lane, a thread
that runs one trial after the other, has GPUs of its own.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distrain.api.config import LoggingConfig, RunConfig, ScalingConfig
from distrain.as_ray.tune.lanes import SideBySide, hostfile_of, lanes_for
from distrain.as_ray.tune.search_space import configs, generator_of, updated
from distrain.as_ray.tune.sweep import ResultGrid, Sweep, Trial
from distrain.as_ray.tune.trainables import Function, WithResources, is_class
from distrain.coordinator.trainer import DataParallelTrainer
from distrain.errors import PreemptionError, StorageError, TrainingFailedError, WorkerGroupError
from distrain.hosts.host_info import usable_cpus
from distrain.storage.paths import read_manifest
from distrain.storage.runs.listing import FAILED, FINISHED
from distrain.system.arguments import check_choice, check_int, check_type
from distrain.system.log import log_level, say, warn
from distrain.system.scratch import temporary_directory

_UNIQUE = re.compile(r"0x[0-9a-f]+|ObjectRef\(\w+\)")
"""Parts of a repr that another process has differently."""
_OPTUNA = "use Optuna, whose objective calls fit() and returns a metric: see examples/optuna_sweep.py"


# -- settings --------------------------------------------------------------------------------------------------------


class FIFOScheduler:
    """Ray's default scheduler, which lets every trial run to its end."""


class BasicVariantGenerator:
    """Ray's grid search and random search, with a seed and with configs to begin with."""

    def __init__(
        self,
        points_to_evaluate: Sequence[Mapping[str, Any]] | None = None,
        max_concurrent: int = 0,
        constant_grid_search: bool = False,
        random_state: Any = None,
    ) -> None:
        self.points = list(points_to_evaluate or ())
        self.max_concurrent = max_concurrent
        self.constant_grid_search = constant_grid_search
        self.random_state = random_state

    def configs(self, space: Mapping[str, Any], num_samples: int) -> list[dict[str, Any]]:
        """Return the configs of all trials."""
        seed = generator_of(self.random_state) if self.random_state is not None else None
        spaces = [updated(space, point) for point in self.points] + [space] * (num_samples - len(self.points))
        return [
            config
            for one in spaces
            for config in configs(one, seed, constant_grid_search=self.constant_grid_search)
        ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Settings of a sweep: ``Tuner(tune_config=...)``.

    metric, mode: the defaults of ``ResultGrid.get_best_result()``.
    num_samples: how often the search space is sampled, each time with all combinations of its grids.
    max_concurrent_trials: the most trials side by side; None for as many as this machine has CPUs and GPUs for.
    """

    metric: str | None = None
    mode: str | None = None
    search_alg: BasicVariantGenerator | None = None
    scheduler: FIFOScheduler | None = None
    num_samples: int = 1
    max_concurrent_trials: int | None = None
    time_budget_s: float | None = None
    reuse_actors: bool = False
    trial_name_creator: Callable[..., str] | None = None
    trial_dirname_creator: Callable[..., str] | None = None

    def __post_init__(self) -> None:
        check_type("TuneConfig.metric", self.metric, str, optional=True)
        if self.mode is not None:
            check_choice("TuneConfig.mode", self.mode, ("min", "max"))
        check_int("TuneConfig.num_samples", self.num_samples, minimum=1)
        check_int("TuneConfig.max_concurrent_trials", self.max_concurrent_trials, minimum=0, optional=True)
        if self.search_alg is not None and not isinstance(self.search_alg, BasicVariantGenerator):
            raise TypeError(f"TuneConfig(search_alg=...): only BasicVariantGenerator; for others {_OPTUNA}")
        if self.scheduler is not None and not isinstance(self.scheduler, FIFOScheduler):
            raise TypeError(f"TuneConfig(scheduler=...): only FIFOScheduler; for others {_OPTUNA}")
        if self.time_budget_s is not None:
            raise TypeError("TuneConfig(time_budget_s=...): every trial runs to its end; choose num_samples instead")
        if self.trial_name_creator or self.trial_dirname_creator:
            warn("TuneConfig: trials are named like their function, and numbered; the name creators have no effect")


class CLIReporter:
    """Stand-in for ``RunConfig(progress_reporter=...)``, without effect: a line says how each trial has ended."""

    def __init__(self, *args: object, **options: object) -> None:
        """Take the arguments of Ray."""

    def add_metric_column(self, *args: object, **options: object) -> None:
        """Do nothing."""


# -- the tuner -------------------------------------------------------------------------------------------------------


class Tuner:
    """Run a trial for every config of a search space.

    trainable: a function that takes the config, and reports or returns metrics; a class of ``ray.tune.Trainable``; or
        a trainer, whose ``param_space`` has the keys ``train_loop_config`` and ``scaling_config``.
    param_space: the config, with grids and domains of ``ray.tune`` anywhere in it.
    run_config: name and storage path of the sweep, and the settings of every trial.

    ::

        tuner = Tuner(train_func, param_space={"lr": tune.grid_search([0.1, 0.01])})
        print(tuner.fit().get_best_result("loss", "min").config)
    """

    def __init__(
        self,
        trainable: Any = None,
        *,
        param_space: Mapping[str, Any] | None = None,
        tune_config: TuneConfig | None = None,
        run_config: RunConfig | None = None,
    ) -> None:
        check_type("Tuner(param_space)", param_space, Mapping, optional=True)
        check_type("Tuner(tune_config)", tune_config, TuneConfig, optional=True)
        check_type("Tuner(run_config)", run_config, RunConfig, optional=True)
        self._bare = bare = trainable.trainable if isinstance(trainable, WithResources) else trainable
        is_other = isinstance(bare, str) or (inspect.isclass(bare) and not is_class(bare))
        if is_other or not (callable(bare) or _is_trainer(bare)):
            raise TypeError(f"Tuner() takes a function, a class of ray.tune.Trainable, or a trainer, got {bare!r}")
        self._trainable = trainable
        self._space = dict(param_space or {})
        if _is_trainer(bare) and (unknown := self._space.keys() - {"train_loop_config", "scaling_config"}):
            raise ValueError(
                f"Tuner(param_space) of a trainer has 'train_loop_config' and 'scaling_config', not "
                f"{', '.join(map(repr, sorted(map(str, unknown))))}"
            )
        self._tune = tune_config or TuneConfig()
        self._run = run_config or (trainable._run if _is_trainer(trainable) else RunConfig())
        self._stop = getattr(self._run, "stop", None)
        if self._stop is not None and _is_trainer(bare):
            raise TypeError("RunConfig(stop=...) is not for trainers: leave the loop of train_func instead")
        self._restored: Sweep | None = None
        self._again: Callable[[Trial], bool] = lambda trial: not trial.has_ended

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        trainable: Any,
        resume_unfinished: bool = True,
        resume_errored: bool = False,
        restart_errored: bool = False,
        param_space: Mapping[str, Any] | None = None,
        storage_filesystem: Any = None,
    ) -> Tuner:
        """Return a Tuner that goes on with the sweep in a directory. A failed trial goes on at its last checkpoint."""
        sweep = Sweep.at(path, storage_filesystem)
        tune_config, run_config = sweep.settings
        tuner = cls(trainable, tune_config=tune_config, run_config=run_config)
        tuner._restored = sweep
        wanted = {FAILED: resume_errored or restart_errored, FINISHED: False}
        tuner._again = lambda trial: wanted.get(trial.status, resume_unfinished)
        return tuner

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> bool:
        """Return True if there is a sweep in the directory."""
        try:
            Sweep.at(path, storage_filesystem)
        except StorageError:
            return False
        return True

    def get_results(self) -> ResultGrid:
        """Return the results of a restored sweep."""
        if self._restored is None:
            raise RuntimeError("Tuner.get_results() is for Tuner.restore(); fit() returns the results of a new sweep")
        return self._restored.results(self._tune.metric, self._tune.mode)

    def fit(self) -> ResultGrid:
        """Run all trials that have not ended, and return the results of all. The errors of trials are in these.

        Raises StorageError, ResourcesError or JobError if a trial could not begin; KeyboardInterrupt after Ctrl-C, and
        PreemptionError after SIGTERM, once no process of any trial is left.
        """
        sweep = self._restored or self._open()
        waiting = [trial for trial in sweep.trials if self._again(trial)]
        say(f"sweep of {len(sweep.trials)} trials; directory {sweep.location}")
        if waiting:
            try:
                self._train(sweep, waiting)
            except (KeyboardInterrupt, PreemptionError):
                say(f"stopped; a Tuner of RunConfig(name={sweep.location.name!r}) goes on with the other trials")
                raise
        results = sweep.results(self._tune.metric, self._tune.mode)
        if results.num_errors:
            warn(f"{results.num_errors} of {len(results)} trials have failed; see the errors of the ResultGrid")
        return results

    def _open(self) -> Sweep:
        search = self._tune.search_alg or BasicVariantGenerator()
        return Sweep.open(
            self._run.storage_path,
            self._run.name,
            self._run.storage_filesystem,
            stem=self._stem,
            space=_UNIQUE.sub("", f"{self._space!r} x {self._tune.num_samples}"),
            settings=(self._tune, self._run),
            make_configs=lambda: search.configs(self._space, self._tune.num_samples),
        )

    @property
    def _stem(self) -> str:
        bare = self._bare
        name = type(bare).__name__ if _is_trainer(bare) else getattr(bare, "__name__", None) or type(bare).__name__
        return "".join(letter for letter in name if letter.isalnum() or letter in "_-") or "trial"

    # -- trials ----------------------------------------------------------------------------------------------------

    def _train(self, sweep: Sweep, waiting: list[Trial]) -> None:
        scaling = self._trainer(waiting[0], sweep)._scaling
        gpus = lanes_for(scaling, self._limit(len(waiting)))
        if len(gpus) > 1:
            say(f"{len(gpus)} trials side by side; the output of each is in logs/ of its directory")
            with temporary_directory("distrain-lanes-") as folder:
                files = [hostfile_of(Path(folder) / f"lane-{i}", each) for i, each in enumerate(gpus)]
                SideBySide([_lane(self, sweep, file, len(files)) for file in files], waiting).run()
            return
        for trial in waiting:
            number = sweep.trials.index(trial) + 1
            say(f"trial {number} of {len(sweep.trials)}: {trial.label}")
            _fit(self._trainer(trial, sweep), trial)

    def _limit(self, trials: int) -> int:
        search = self._tune.search_alg
        limits = (self._tune.max_concurrent_trials, search.max_concurrent if search else None)
        return min([trials, *(limit for limit in limits if limit)])

    def _trainer(self, trial: Trial, sweep: Sweep) -> DataParallelTrainer:
        """Return the trainer of a trial."""
        run = replace(self._run, name=trial.name, storage_path=str(sweep.location))
        if _is_trainer(self._trainable):
            scaling = trial.config.get("scaling_config")
            scaling = ScalingConfig(**scaling) if isinstance(scaling, Mapping) else scaling
            trainer: DataParallelTrainer = self._trainable
            return trainer._for_trial(trial.config.get("train_loop_config", {}), scaling, run)
        function, scaling = self._bare, ScalingConfig(num_workers=1)
        if isinstance(self._trainable, WithResources):
            scaling = self._trainable.scaling(trial.config)
        return DataParallelTrainer(
            Function(function, self._stop), train_loop_config=trial.config, scaling_config=scaling, run_config=run
        )

    def _quiet_trainer(self, trial: Trial, sweep: Sweep, hostfile: str | None, lanes: int) -> DataParallelTrainer:
        """Return the trainer of a trial that shares the machine and the console with others."""
        trainer = self._trainer(trial, sweep)
        scaling, run = trainer._scaling, trainer._run
        environment = {"OMP_NUM_THREADS": str(max(1, usable_cpus() // (lanes * scaling.max_workers)))}
        if "OMP_NUM_THREADS" in os.environ:
            environment = {}
        return trainer._for_trial(
            {},
            scaling if hostfile is None else replace(scaling, hostfile=hostfile),
            replace(
                run,
                progress="off",
                logging_config=LoggingConfig(log_level="ERROR", ranks=()),
                worker_runtime_env={"env_vars": {**environment, **run.env_vars}},
            ),
        )


def _is_trainer(trainable: object) -> bool:
    return isinstance(trainable, DataParallelTrainer)


def _fit(trainer: DataParallelTrainer, trial: Trial) -> None:
    """Run a trial. Its error is in its directory, unless it has none or the whole sweep shall end."""
    try:
        trainer.fit()
    except PreemptionError:
        raise
    except TrainingFailedError as error:
        if not read_manifest(trial.location):
            raise
        with log_level("INFO"):
            warn(f"trial {trial.name} has failed ({trial.label}): {_reason(error)}")


def _reason(error: TrainingFailedError) -> str:
    if isinstance(error, WorkerGroupError) and error.failures:
        return f"rank {error.culprit}: {error.failures[0].summary}"
    return str(error).partition("\n")[0]


def _lane(tuner: Tuner, sweep: Sweep, hostfile: str | None, lanes: int) -> Callable[[Trial], None]:
    """Return the function that runs a trial in a lane."""

    def run(trial: Trial) -> None:
        with log_level("INFO"):
            say(f"trial {trial.name} begins: {trial.label}")
        _fit(tuner._quiet_trainer(trial, sweep, hostfile, lanes), trial)
        if trial.status == FINISHED:
            with log_level("INFO"):
                say(f"trial {trial.name} has finished: {trial.label}")

    return run

"""``ray.tune.Tuner``: grid search and random search, with a run for every trial, one after the other.

Runs in: coordinator.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from distrain.api.config import RunConfig, ScalingConfig
from distrain.as_ray.tune.search_space import configs, generator_of
from distrain.as_ray.tune.sweep import ResultGrid, Sweep, Trial
from distrain.as_ray.tune.trainables import Function, scaling_for
from distrain.coordinator.trainer import DataParallelTrainer
from distrain.errors import PreemptionError, TrainingFailedError, WorkerGroupError
from distrain.storage.paths import read_manifest
from distrain.system.arguments import check_choice, check_int, check_type
from distrain.system.log import say, warn

if TYPE_CHECKING:
    import os

_UNIQUE = re.compile(r"0x[0-9a-f]+|ObjectRef\(\w+\)")
"""Parts of a repr that another process has differently."""
_OPTUNA = "use Optuna, whose objective calls fit() and returns a metric: see examples/optuna_sweep.py"


# -- settings --------------------------------------------------------------------------------------------------------


class FIFOScheduler:
    """Ray's default scheduler, which lets every trial run to its end."""


class BasicVariantGenerator:
    """Ray's grid search and random search, with a seed."""

    def __init__(self, *, max_concurrent: int = 0, random_state: Any = None) -> None:
        self.random_state = random_state


@dataclass(frozen=True)
class TuneConfig:
    """Settings of a sweep: ``Tuner(tune_config=...)``.

    metric, mode: the defaults of ``ResultGrid.get_best_result()``.
    num_samples: how often the search space is sampled, each time with all combinations of its grids.
    max_concurrent_trials, reuse_actors: no effect because trials run one after the other.
    """

    metric: str | None = None
    mode: str | None = None
    search_alg: BasicVariantGenerator | None = None
    scheduler: FIFOScheduler | None = None
    num_samples: int = 1
    max_concurrent_trials: int | None = None
    time_budget_s: float | None = None
    reuse_actors: bool = False

    def __post_init__(self) -> None:
        check_type("TuneConfig.metric", self.metric, str, optional=True)
        if self.mode is not None:
            check_choice("TuneConfig.mode", self.mode, ("min", "max"))
        check_int("TuneConfig.num_samples", self.num_samples, minimum=1)
        if self.search_alg is not None and not isinstance(self.search_alg, BasicVariantGenerator):
            raise TypeError(f"TuneConfig(search_alg=...): only BasicVariantGenerator; for others {_OPTUNA}")
        if self.scheduler is not None and not isinstance(self.scheduler, FIFOScheduler):
            raise TypeError(f"TuneConfig(scheduler=...): only FIFOScheduler; for others {_OPTUNA}")
        if self.time_budget_s is not None:
            raise TypeError("TuneConfig(time_budget_s=...): every trial runs to its end; choose num_samples instead")


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
        is_trainer = isinstance(trainable, DataParallelTrainer)
        if not is_trainer and (not callable(trainable) or inspect.isclass(trainable)):
            raise TypeError(f"Tuner() takes a function or a trainer, got {trainable!r}")
        self._trainable = trainable
        self._space = dict(param_space or {})
        if is_trainer and (unknown := self._space.keys() - {"train_loop_config", "scaling_config"}):
            raise ValueError(
                f"Tuner(param_space) of a trainer has 'train_loop_config' and 'scaling_config', not "
                f"{', '.join(map(repr, sorted(map(str, unknown))))}"
            )
        self._tune = tune_config or TuneConfig()
        self._run = run_config or (trainable._run if is_trainer else RunConfig())
        self._stop = getattr(self._run, "stop", None)
        if self._stop is not None and is_trainer:
            raise TypeError("RunConfig(stop=...) is not for trainers: exit the loop in train_func instead")

    @classmethod
    def restore(cls, path: str | os.PathLike[str], *args: Any, **options: Any) -> NoReturn:
        """Raise TypeError that says how to continue a sweep."""
        raise TypeError(
            f"Tuner.restore({str(path)!r}) is not needed: make the Tuner as before, with the same RunConfig(name=..., "
            "storage_path=...); fit() continues an unfinished sweep of that name"
        )

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], **options: Any) -> bool:
        """Return False: a new Tuner of the same name continues an unfinished sweep."""
        return False

    def fit(self) -> ResultGrid:
        """Run all trials that have not ended, and return the results of all. The errors of trials are in these.

        Raises StorageError, ResourcesError or JobError if a trial could not begin; KeyboardInterrupt after Ctrl-C, and
        PreemptionError after SIGTERM, once no process of the trial is left.
        """
        space = _UNIQUE.sub("", f"{self._space!r} x {self._tune.num_samples}")
        sweep = Sweep.open(self._run, self._stem, space, self._configs)
        say(f"sweep of {len(sweep.trials)} trials; directory {sweep.location}")
        for number, trial in enumerate(sweep.trials, 1):
            if trial.has_ended:
                continue
            say(f"trial {number} of {len(sweep.trials)}: {trial.label}")
            try:
                _fit(self._trainer(trial, sweep), trial)
            except (KeyboardInterrupt, PreemptionError):
                say(f"stopped; a Tuner of RunConfig(name={sweep.location.name!r}) continues with the other trials")
                raise
        results = ResultGrid(sweep, self._tune.metric, self._tune.mode)
        if results.num_errors:
            warn(f"{results.num_errors} of {len(results)} trials have failed; see the errors of the ResultGrid")
        return results

    def _configs(self) -> list[dict[str, Any]]:
        state = self._tune.search_alg.random_state if self._tune.search_alg else None
        seed = None if state is None else generator_of(state)
        return [config for _ in range(self._tune.num_samples) for config in configs(self._space, seed)]

    @property
    def _stem(self) -> str:
        name = getattr(self._trainable, "__name__", None) or type(self._trainable).__name__
        return "".join(letter for letter in name if letter.isalnum() or letter in "_-") or "trial"

    def _trainer(self, trial: Trial, sweep: Sweep) -> DataParallelTrainer:
        """Return the trainer of a trial."""
        own = {"name": trial.location.name, "storage_path": str(sweep.location)}
        run = replace(self._run, **own, **({"stop": None} if self._stop else {}))
        if isinstance(self._trainable, DataParallelTrainer):
            scaling = trial.config.get("scaling_config")
            scaling = ScalingConfig(**scaling) if isinstance(scaling, Mapping) else scaling
            return self._trainable._for_trial(trial.config.get("train_loop_config", {}), scaling, run)
        return DataParallelTrainer(
            Function(self._trainable, self._stop),
            train_loop_config=trial.config,
            scaling_config=scaling_for(self._trainable),
            run_config=run,
        )


def _fit(trainer: DataParallelTrainer, trial: Trial) -> None:
    """Run a trial. Its error is in its directory, unless it has none or the whole sweep shall end."""
    try:
        trainer.fit()
    except PreemptionError:
        raise
    except TrainingFailedError as error:
        if not read_manifest(trial.location):
            raise
        reason = str(error).partition("\n")[0]
        if isinstance(error, WorkerGroupError) and error.failures:
            reason = f"rank {error.culprit}: {error.failures[0].summary}"
        warn(f"trial {trial.location.name} has failed ({trial.label}): {reason}")

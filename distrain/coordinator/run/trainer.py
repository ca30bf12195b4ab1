"""``DataParallelTrainer``: a training function and its settings, checked before anything runs. Runs in: coordinator."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from distrain.api.backend import BackendConfig
from distrain.api.config import DataConfig, RunConfig, ScalingConfig
from distrain.api.ray_names import checks_arguments
from distrain.api.trainer_options import check_options, showing_options
from distrain.coordinator.run.error_screen import show_if_uncaught
from distrain.coordinator.run.fit import run_work
from distrain.coordinator.run.hydra_job import beside_output, resolved
from distrain.errors import DistrainError
from distrain.storage.checkpoint import Checkpoint
from distrain.storage.paths import read_manifest
from distrain.system.arguments import check_type
from distrain.system.log import warn
from distrain.system.notebook import hide_own_lines
from distrain.system.remote_path import locate
from distrain.worker.job import job
from distrain.worker.job.functions import check_plain, check_signature, name_of, takes_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Unpack

    from distrain.api.result import Result
    from distrain.api.trainer_options import TrainerOptions
    from distrain.data.constructors import RunDatasets


@checks_arguments
class DataParallelTrainer:
    """Run a training function on a group of workers.

    train_loop_per_worker: the function, with no parameter or one for the config. It runs in the main thread of every
        worker.
    train_loop_config: the argument of that function, ``{}`` by default. It is pickled once per run, so keep large
        objects out of it. A DictConfig of OmegaConf arrives as one, with its interpolations resolved.
    scaling_config: how many workers, on which hosts, with which GPUs.
    run_config: where the run is stored, under which name, and what happens after failures.
    backend_config: the framework's settings and hooks.
    datasets: by name, the data that :func:`distrain.get_dataset_shard` divides among the workers: a Dataset of
        :mod:`distrain.data`; a dataset of torch or Hugging Face; a pyarrow Table, a pandas DataFrame, a dict of arrays,
        a list of dicts; a path, glob pattern or URL of Parquet, CSV or JSON files, or a list of these; or a function
        that makes one of these on the worker.
    dataset_config: how they are read.
    resume_from_checkpoint: the checkpoint, or its path, that a *new* run starts from. A run that is continued starts
        from its own latest checkpoint.
    validation_config: how ``report(validation=...)`` validates a checkpoint.
    metadata: JSON that ``get_context().get_metadata()`` returns, and that every checkpoint of the run gets.

    Raises TypeError or ValueError for bad arguments.

    ::

        def train_func(config):
            distrain.report({"loss": 2 * config["lr"]})

        scaling = distrain.ScalingConfig(num_workers=2)
        result = DataParallelTrainer(train_func, train_loop_config={"lr": 0.1}, scaling_config=scaling).fit()
    """

    @showing_options
    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        backend_config: BackendConfig | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        resume_from = options.get("resume_from_checkpoint")
        if isinstance(resume_from, (str, Path)):
            resume_from = options["resume_from_checkpoint"] = Checkpoint(resume_from)
        check_type("backend_config", backend_config, BackendConfig, optional=True)
        check_options(options)
        datasets, validation = options.get("datasets"), options.get("validation_config")
        if validation is not None:
            check_plain("ValidationConfig.fn", validation.fn)
        self._work = job.FunctionWork(
            function=check_signature(train_loop_per_worker),
            config=resolved(options.get("train_loop_config") or {}),
            backend=backend_config or BackendConfig(),
            run_datasets=_datasets(datasets, options.get("dataset_config") or DataConfig()) if datasets else None,
        )
        if self._work.config and not takes_config(train_loop_per_worker):
            warn(f"{name_of(train_loop_per_worker)}() takes no argument, so train_loop_config has no effect")
        self._scaling = options.get("scaling_config") or ScalingConfig()
        self._run = options.get("run_config") or RunConfig()
        self._resume_from = resume_from
        self._validation = validation
        self._metadata = _json("metadata", options.get("metadata") or {})

    @classmethod
    def restore(cls, path: str | os.PathLike[str], *args: Any, **options: Any) -> NoReturn:
        """Raise TypeError that says how to continue a run: distrain needs no ``restore()``, which Ray AIR has."""
        raise TypeError(
            f"{cls.__name__}.restore() is not needed: make the trainer as before, with "
            f"RunConfig(name={os.path.basename(os.path.normpath(path))!r}, storage_path=...); fit() continues an "
            "unfinished run of that name at its last checkpoint"
        )

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str]) -> bool:
        """Return True if ``fit()`` with this run directory would continue a run."""
        manifest = read_manifest(locate(path))
        return bool(manifest) and manifest.get("status") != "finished"

    def fit(self) -> Result:
        """Train, wait for the end, and return the result.

        Raises JobError, ResourcesError or StorageError before any worker starts; TrainingFailedError, with the partial
        ``result``, if a rank or a host failed; KeyboardInterrupt after Ctrl-C, once every worker is gone;
        PreemptionError after SIGTERM, SIGHUP or SIGQUIT, and then at every further call in this process. Their
        tracebacks end here; if nothing catches one, a screen without a traceback shows it. The exceptions of ranks are
        in ``WorkerGroupError.worker_failures``.
        """
        __tracebackhide__ = True  # pytest omits frames that have this variable
        try:
            return run_work(
                self._work,
                self._scaling,
                beside_output(self._run),
                resume_from=self._resume_from,
                metadata=self._metadata,
                validation=self._validation,
            )
        except (DistrainError, KeyboardInterrupt) as error:
            hide_own_lines(error)
            show_if_uncaught(__name__)
            raise error.with_traceback(None) from None


def _datasets(datasets: Mapping[str, Any], config: DataConfig) -> RunDatasets:
    from distrain.data.constructors import run_datasets  # it needs numpy

    return run_datasets(
        datasets,
        config.datasets_to_split,
        on_change=config.on_change,
        resume=config.resume,
    )


def _json(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be JSON, because every checkpoint stores it in a file: {error}") from None
    return plain

"""Trainables of a Tuner besides plain functions, and what they call in a trial. Runs in: coordinator, and worker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain.api.config import RunConfig, ScalingConfig, UserCallback
from distrain.as_ray.tune.search_space import flat
from distrain.session import get_checkpoint, get_context
from distrain.session import report as report_metrics
from distrain.storage.checkpoint import Checkpoint
from distrain.system.ray_names import without
from distrain.system.scratch import temporary_directory
from distrain.worker.session import session_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.worker.session import Session

_DEFAULT_METRIC = "_metric"
"""Ray's name for the metric of a function that returns a number."""


def report(metrics: Mapping[str, Any] | None = None, *, checkpoint: Checkpoint | None = None, **named: Any) -> None:
    """Report metrics of a trial. Earlier versions of Ray take them as keyword arguments."""
    report_metrics({**(metrics or {}), **named}, checkpoint=checkpoint)


def with_parameters(trainable: Callable[..., Any], **parameters: Any) -> Callable[..., Any]:
    """Return the function with some of its arguments."""
    function = functools.partial(trainable, **parameters)
    functools.update_wrapper(function, trainable)
    return function


class PlacementGroupFactory:
    """Bundles of resources, of which the sum counts."""

    def __init__(self, bundles: Sequence[Mapping[str, float]], *args: object, **options: object) -> None:
        self.bundles = list(bundles)

    def total(self) -> dict[str, float]:
        """Return the resources of all bundles."""
        names = {name for bundle in self.bundles for name in bundle}
        return {name: sum(bundle.get(name, 0) for bundle in self.bundles) for name in names}


@dataclass(frozen=True)
class WithResources:
    """A trainable, and what each of its trials needs."""

    trainable: Callable[..., Any]
    resources: Mapping[str, float] | PlacementGroupFactory | Callable[[Mapping[str, Any]], Any]

    def scaling(self, config: Mapping[str, Any]) -> ScalingConfig:
        wanted: Any = self.resources(config) if callable(self.resources) else self.resources
        total = wanted.total() if isinstance(wanted, PlacementGroupFactory) else wanted
        by_name = {{"cpu": "CPU", "gpu": "GPU"}.get(name, name): amount for name, amount in total.items() if amount}
        return ScalingConfig(num_workers=1, use_gpu="GPU" in by_name, resources_per_worker=by_name or None)


def with_resources(trainable: Callable[..., Any], resources: Any) -> WithResources:
    """Return the function with the resources of a trial, as ``{"cpu": 2, "gpu": 1}``."""
    return WithResources(trainable, resources)


@without("local_dir", "log_to_file", "progress_reporter", "sync_config")
@dataclass(frozen=True, kw_only=True)
class TuneRunConfig(RunConfig):
    """``ray.tune.RunConfig``, which has one more field.

    stop: ends a trial of a function or class after the report in which a metric has reached its value; or a function
        that takes the id of the trial and the metrics, and returns True for the last report.
    """

    stop: Mapping[str, float] | Callable[[str, dict[str, Any]], bool] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.stop is None or isinstance(self.stop, Mapping) or inspect.isfunction(self.stop)):
            raise TypeError(f"RunConfig(stop=...) takes a dict of metrics or a function, got {self.stop!r}")


class _EnoughError(BaseException):
    """Ends the function of a trial. Not an Exception, which the function may catch."""


class Function:
    """A function or class of a trial, as a train_func: what a function returns is reported, too."""

    def __init__(self, trainable: Callable[..., Any], stop: Any = None) -> None:
        self._trainable = trainable
        self._stop = stop
        self._reports = 0

    def __call__(self, config: dict[str, Any]) -> Any:
        """Run the trial in this worker."""
        if is_class(self._trainable):
            return self._run_steps(self._trainable(config))
        if self._stop is not None:
            self._stop_after_reports(session_of("report"))
        try:
            value = self._trainable(config)
        except _EnoughError:
            return None
        if value is not None:
            report_metrics(value if isinstance(value, Mapping) else {_DEFAULT_METRIC: value})
        return value

    def _stop_after_reports(self, session: Session) -> None:
        record = session.report

        def record_and_stop(metrics: Mapping[str, Any], *args: Any, **named: Any) -> None:
            record(metrics, *args, **named)
            if self._is_last(metrics):
                raise _EnoughError

        session.report = record_and_stop  # type: ignore[method-assign]

    def _is_last(self, metrics: Mapping[str, Any]) -> bool:
        self._reports += 1
        shown = {"training_iteration": self._reports, **metrics}
        if callable(self._stop):
            return bool(self._stop(get_context().get_trial_id(), shown))
        values = flat(shown)
        return any(name in values and values[name] >= limit for name, limit in (self._stop or {}).items())

    def _run_steps(self, trainable: Trainable) -> None:
        saves, is_last = type(trainable).save_checkpoint is not Trainable.save_checkpoint, False
        if (start := get_checkpoint()) is not None:
            with start.as_directory() as folder:
                trainable.load_checkpoint(folder)
        while not is_last:
            metrics = trainable.step()
            trainable.iteration += 1
            is_last = self._is_last(metrics) or bool(metrics.get("done"))
            with temporary_directory("distrain-checkpoint-") as folder:
                made = trainable.save_checkpoint(folder) if saves and is_last else None
                checkpoint = made if isinstance(made, Checkpoint) else Checkpoint(folder) if saves and is_last else None
                if isinstance(made, dict):
                    checkpoint = Checkpoint.from_dict(made)
                report_metrics({"training_iteration": trainable.iteration, **metrics}, checkpoint=checkpoint)
        trainable.cleanup()


class Trainable:
    """A trial as a class: ``setup()``, then ``step()`` until ``RunConfig(stop=...)``, or a metric ``done``.

    ``save_checkpoint()``, if there is one, is called after the last step.
    """

    def __init__(self, config: dict[str, Any] | None = None, **parameters: Any) -> None:
        self.config = dict(config or {})
        self.iteration = 0
        self.setup(self.config, **parameters)

    def setup(self, config: dict[str, Any], **parameters: Any) -> None:
        """Prepare the first step."""

    def step(self) -> dict[str, Any]:
        """Return the metrics of one step."""
        raise NotImplementedError("a class of ray.tune.Trainable needs a method step(), which returns metrics")

    def save_checkpoint(self, checkpoint_dir: str) -> Any:
        """Save files, or return a dict to save."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Load what was saved."""

    def cleanup(self) -> None:
        """Do what is left to do after the last step."""

    @property
    def training_iteration(self) -> int:
        """The number of steps that are done."""
        return self.iteration

    @property
    def logdir(self) -> str:
        """The directory of the trial."""
        return get_context().get_trial_dir()

    @property
    def trial_id(self) -> str:
        """The id of the trial."""
        return get_context().get_trial_id()

    @property
    def trial_name(self) -> str:
        """The name of the trial."""
        return get_context().get_trial_name()


def is_class(trainable: Any) -> bool:
    """Tell a class of :class:`Trainable`, perhaps with parameters, from a function."""
    kind = trainable.func if isinstance(trainable, functools.partial) else trainable
    return inspect.isclass(kind) and issubclass(kind, Trainable)


class TuneReportCallback(UserCallback):
    """``ray.tune.integration.ray_train``: reports of a run that a trial starts become reports of the trial."""

    def after_report(self, run_context: Any, metrics: list[dict[str, Any] | None], checkpoint: Any) -> None:
        """Report the metrics of rank 0."""
        path = {} if checkpoint is None else {"checkpoint_path": checkpoint.path}
        report_metrics({**(metrics[0] or {}), **path})

"""Trainables of a Tuner besides plain functions, and what they call in a trial. Runs in: coordinator, and worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain.api import config
from distrain.api.config import ScalingConfig, UserCallback
from distrain.api.ray_names import checks_arguments
from distrain.session import report as report_metrics
from distrain.system.arguments import check_type
from distrain.system.text import flatten
from distrain.worker.session import session_of

if TYPE_CHECKING:
    from distrain.storage.checkpoint import Checkpoint

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


def with_resources(trainable: Callable[..., Any], resources: Mapping[str, float]) -> Callable[..., Any]:
    """Return the function with the resources of a trial, as ``{"cpu": 2, "gpu": 1}``."""
    check_type("with_resources(resources)", resources, Mapping)
    function = with_parameters(trainable)
    vars(function)["resources"] = resources
    return function


def scaling_for(trainable: Callable[..., Any]) -> ScalingConfig:
    """Return the ScalingConfig of a trial. Raises ValueError for resources that distrain does not know."""
    names = {"cpu": "CPU", "gpu": "GPU"}
    resources: Mapping[str, float] = getattr(trainable, "resources", {})
    needs = {names.get(name, name): amount for name, amount in resources.items() if amount}
    return ScalingConfig(num_workers=1, use_gpu="GPU" in needs, resources_per_worker=needs or None)


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class RunConfig(config.RunConfig):
    """``RunConfig`` of Ray, which has one more field.

    stop: ends a trial after the report in which a metric has reached its value, or for which a function of the trial's
        id and the metrics returns True.
    """

    stop: Mapping[str, float] | Callable[[str, dict[str, Any]], bool] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("RunConfig.stop", self.stop, (Mapping, Callable), "a dict or a function", optional=True)


class _EnoughError(BaseException):
    """Ends the function of a trial. Not an Exception, which the function may catch."""


class Function:
    """The function of a trial, as a train_func: what it returns is reported, too."""

    def __init__(self, trainable: Callable[..., Any], stop: Any = None) -> None:
        self._trainable = trainable
        self._stop = stop or {}
        self._reports = 0

    def __call__(self, config: dict[str, Any]) -> Any:
        """Run the trial in this worker."""
        session = session_of("report")
        record = session.report

        def record_and_stop(metrics: Mapping[str, Any], *args: Any, **named: Any) -> None:
            record(metrics, *args, **named)
            self._reports += 1
            values = flatten({"training_iteration": self._reports, **metrics})
            if callable(self._stop):
                is_enough = self._stop(session.context.get_trial_id(), values)
            else:
                is_enough = any(name in values and values[name] >= limit for name, limit in self._stop.items())
            if is_enough:
                raise _EnoughError

        session.report = record_and_stop  # type: ignore[method-assign]
        try:
            value = self._trainable(config)
        except _EnoughError:
            return None
        if value is not None:
            report_metrics(value if isinstance(value, Mapping) else {_DEFAULT_METRIC: value})
        return value


class TuneReportCallback(UserCallback):
    """``ray.tune.integration.ray_train``: reports of a run that a trial starts become reports of the trial."""

    def after_report(self, run_context: Any, metrics: list[dict[str, Any] | None], checkpoint: Any) -> None:
        """Report the metrics of rank 0."""
        path = {} if checkpoint is None else {"checkpoint_path": checkpoint.path}
        report_metrics({**(metrics[0] or {}), **path})

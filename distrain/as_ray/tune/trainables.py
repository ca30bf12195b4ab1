"""What a Tuner takes besides plain functions, and what these call in a trial. Runs in: coordinator, and worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrain.config import ScalingConfig, UserCallback
from distrain.session import report as report_metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.checkpoint import Checkpoint

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


@dataclass(frozen=True)
class Function:
    """A function of a trial, as a train_func: what it returns is reported, too."""

    function: Callable[..., Any]

    def __call__(self, config: dict[str, Any]) -> Any:
        value = self.function(config)
        if value is not None:
            report_metrics(value if isinstance(value, Mapping) else {_DEFAULT_METRIC: value})
        return value


class TuneReportCallback(UserCallback):
    """``ray.tune.integration.ray_train``: reports of a run that a trial starts become reports of the trial."""

    def after_report(self, run_context: Any, metrics: list[dict[str, Any] | None], checkpoint: Any) -> None:
        """Report the metrics of rank 0."""
        path = {} if checkpoint is None else {"checkpoint_path": checkpoint.path}
        report_metrics({**(metrics[0] or {}), **path})

"""distrain: Ray Train's programming model without Ray.

Distributed PyTorch (and TensorFlow) training on one machine or over ssh, from one Python call. Public names are loaded
when they are first used: ``import distrain`` takes milliseconds and never imports torch. Runs in: anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distrain.backend import BackendConfig
    from distrain.checkpoint import Checkpoint
    from distrain.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from distrain.errors import (
        CheckpointError,
        DistrainError,
        JobError,
        LaunchError,
        PreemptionError,
        ResourcesError,
        StorageError,
        TrainingFailedError,
        WorkerGroupError,
    )
    from distrain.result import Result
    from distrain.session import TrainContext, get_checkpoint, get_context, report
    from distrain.trainer import DataParallelTrainer
    from distrain.version import __version__

_HOMES = {
    "backend": ("BackendConfig",),
    "checkpoint": ("Checkpoint",),
    "config": ("CheckpointConfig", "FailureConfig", "RunConfig", "ScalingConfig"),
    "errors": (
        "CheckpointError",
        "DistrainError",
        "JobError",
        "LaunchError",
        "PreemptionError",
        "ResourcesError",
        "StorageError",
        "TrainingFailedError",
        "WorkerGroupError",
    ),
    "result": ("Result",),
    "session": ("TrainContext", "get_checkpoint", "get_context", "report"),
    "trainer": ("DataParallelTrainer",),
    "version": ("__version__",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BackendConfig",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointError",
    "DataParallelTrainer",
    "DistrainError",
    "FailureConfig",
    "JobError",
    "LaunchError",
    "PreemptionError",
    "ResourcesError",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "StorageError",
    "TrainContext",
    "TrainingFailedError",
    "WorkerGroupError",
    "__version__",
    "get_checkpoint",
    "get_context",
    "report",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'distrain' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"distrain.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

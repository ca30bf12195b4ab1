"""distrain: Ray Train's programming model without Ray.

Distributed PyTorch (and TensorFlow) training on one machine or over ssh, from one Python call. Public names are loaded
when they are first used: ``import distrain`` takes milliseconds and never imports torch. Runs in: anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.absent import explain

if TYPE_CHECKING:
    from distrain.backend import BackendConfig
    from distrain.callbacks import RunContext, UserCallback
    from distrain.checkpoint import Checkpoint
    from distrain.config import (
        CheckpointConfig,
        FailureConfig,
        LoggingConfig,
        RunConfig,
        ScalingConfig,
        ValidationConfig,
        ValidationTaskConfig,
    )
    from distrain.context import TrainContext
    from distrain.errors import (
        CheckpointError,
        CollectiveError,
        ControllerError,
        DistrainError,
        HangError,
        HostfileError,
        JobError,
        LaunchError,
        PreemptionError,
        ResourcesError,
        StorageError,
        TrainingFailedError,
        WorkerGroupError,
    )
    from distrain.reported import CheckpointConsistencyMode, ReportedCheckpoint, ReportedCheckpointStatus
    from distrain.result import Result
    from distrain.session import get_all_reported_checkpoints, get_checkpoint, get_context, report, should_stop
    from distrain.trainer import DataParallelTrainer
    from distrain.uploads import CheckpointUploadMode
    from distrain.version import __version__

_HOMES = {
    "backend": ("BackendConfig",),
    "callbacks": ("RunContext", "UserCallback"),
    "checkpoint": ("Checkpoint",),
    "config": (
        "CheckpointConfig",
        "FailureConfig",
        "LoggingConfig",
        "RunConfig",
        "ScalingConfig",
        "ValidationConfig",
        "ValidationTaskConfig",
    ),
    "errors": (
        "CheckpointError",
        "CollectiveError",
        "ControllerError",
        "DistrainError",
        "HangError",
        "HostfileError",
        "JobError",
        "LaunchError",
        "PreemptionError",
        "ResourcesError",
        "StorageError",
        "TrainingFailedError",
        "WorkerGroupError",
    ),
    "result": ("Result",),
    "context": ("TrainContext",),
    "reported": ("CheckpointConsistencyMode", "ReportedCheckpoint", "ReportedCheckpointStatus"),
    "session": ("get_all_reported_checkpoints", "get_checkpoint", "get_context", "report", "should_stop"),
    "trainer": ("DataParallelTrainer",),
    "uploads": ("CheckpointUploadMode",),
    "version": ("__version__",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("collective", "huggingface", "lightning", "session", "tensorflow", "torch")
"""Public modules that need no import of their own: ``distrain.torch.prepare_model``."""

__all__ = [
    "BackendConfig",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointError",
    "CheckpointUploadMode",
    "CollectiveError",
    "ControllerError",
    "DataParallelTrainer",
    "DistrainError",
    "FailureConfig",
    "HangError",
    "HostfileError",
    "JobError",
    "LaunchError",
    "LoggingConfig",
    "PreemptionError",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "ResourcesError",
    "Result",
    "RunConfig",
    "RunContext",
    "ScalingConfig",
    "StorageError",
    "TrainContext",
    "TrainingFailedError",
    "UserCallback",
    "ValidationConfig",
    "ValidationTaskConfig",
    "WorkerGroupError",
    "__version__",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "report",
    "should_stop",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"distrain.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(explain("distrain", name))
    value = getattr(import_module(f"distrain.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

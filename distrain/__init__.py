"""distrain: Ray Train's programming model without Ray.

Distributed PyTorch (and TensorFlow) training on one machine or over ssh, from one Python call. Public names are loaded
when they are first used: ``import distrain`` takes milliseconds and never imports torch. Runs in: anywhere.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from distrain.api.ray_names import explain, is_asked_for_as_ray
from distrain.system.imports import lazy_names

if TYPE_CHECKING:  # for editors and type checkers, which do not see what is imported on first use
    from distrain.api.backend import BackendConfig as BackendConfig
    from distrain.api.config import CheckpointConfig as CheckpointConfig
    from distrain.api.config import CheckpointUploadMode as CheckpointUploadMode
    from distrain.api.config import DataConfig as DataConfig
    from distrain.api.config import FailureConfig as FailureConfig
    from distrain.api.config import LoggingConfig as LoggingConfig
    from distrain.api.config import RunConfig as RunConfig
    from distrain.api.config import RunContext as RunContext
    from distrain.api.config import ScalingConfig as ScalingConfig
    from distrain.api.config import ShippingConfig as ShippingConfig
    from distrain.api.config import UserCallback as UserCallback
    from distrain.api.config import ValidationConfig as ValidationConfig
    from distrain.api.config import ValidationTaskConfig as ValidationTaskConfig
    from distrain.api.context import CheckpointConsistencyMode as CheckpointConsistencyMode
    from distrain.api.context import ReportedCheckpoint as ReportedCheckpoint
    from distrain.api.context import ReportedCheckpointStatus as ReportedCheckpointStatus
    from distrain.api.context import TrainContext as TrainContext
    from distrain.api.observer import Observer as Observer
    from distrain.api.result import Result as Result
    from distrain.api.runs import RunInfo as RunInfo
    from distrain.api.runs import runs as runs
    from distrain.coordinator.run.trainer import DataParallelTrainer as DataParallelTrainer
    from distrain.drilling.drill import drill as drill
    from distrain.errors import CheckpointError as CheckpointError
    from distrain.errors import CollectiveError as CollectiveError
    from distrain.errors import ControllerError as ControllerError
    from distrain.errors import DataError as DataError
    from distrain.errors import DistrainError as DistrainError
    from distrain.errors import HangError as HangError
    from distrain.errors import HostfileError as HostfileError
    from distrain.errors import JobError as JobError
    from distrain.errors import LaunchError as LaunchError
    from distrain.errors import PreemptionError as PreemptionError
    from distrain.errors import ResourcesError as ResourcesError
    from distrain.errors import Rollback as Rollback
    from distrain.errors import StorageError as StorageError
    from distrain.errors import TrainingFailedError as TrainingFailedError
    from distrain.errors import WorkerGroupError as WorkerGroupError
    from distrain.prometheus import Prometheus as Prometheus
    from distrain.session import get_all_reported_checkpoints as get_all_reported_checkpoints
    from distrain.session import get_checkpoint as get_checkpoint
    from distrain.session import get_context as get_context
    from distrain.session import get_dataset_shard as get_dataset_shard
    from distrain.session import report as report
    from distrain.session import should_stop as should_stop
    from distrain.storage.checkpoint import Checkpoint as Checkpoint
    from distrain.system import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    __file__,
    modules=(
        "collective", "data", "huggingface", "jax", "lightgbm", "lightning", "page", "session", "tensorflow", "torch",
        "trackers", "xgboost",
    ),
    explain=explain,
)  # fmt: skip

if is_asked_for_as_ray():  # then ``import ray`` finds the stand-in
    import_module("distrain.as_ray")

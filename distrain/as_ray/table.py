"""The names of Ray, and where each comes from. Runs in: anywhere."""

from __future__ import annotations

from typing import TypeAlias

Home: TypeAlias = "str | dict[str, tuple[str, ...]]"
Names: TypeAlias = "dict[str, tuple[str, ...]]"

_CONFIGS = (
    *("CheckpointConfig", "CheckpointUploadMode", "DataConfig", "FailureConfig", "LoggingConfig", "RunConfig"),
    *("ScalingConfig", "UserCallback", "ValidationConfig", "ValidationTaskConfig"),
)
_CONTEXT = ("CheckpointConsistencyMode", "ReportedCheckpoint", "ReportedCheckpointStatus", "TrainContext")
_ERRORS = ("ControllerError", "NCCLHangError=HangError", "PreemptionError", "TrainingFailedError", "WorkerGroupError")
_IN_WORKER = ("get_all_reported_checkpoints", "get_checkpoint", "get_context", "get_dataset_shard", "report")

_AIR_CONFIG: Names = {
    "distrain.as_ray.constants": ("SyncConfig",),
    "distrain.config": ("CheckpointConfig", "DataConfig", "FailureConfig", "RunConfig", "ScalingConfig"),
}
_BACKEND: Names = {"distrain.backend": ("BackendConfig",)}
_CHECKPOINT: Names = {"distrain.checkpoint": ("Checkpoint",)}
_DATA_PARALLEL_TRAINER: Names = {"distrain.trainer": ("DataParallelTrainer",)}
_KERAS: Names = {
    "distrain.tensorflow.keras": ("ReportCheckpointCallback", "RayReportCallback=ReportCheckpointCallback")
}
_MLFLOW: Names = {"distrain.as_ray.integrations": ("MLflowLoggerCallback=mlflow_callback", "setup_mlflow")}
_RESULT: Names = {"distrain.result": ("Result",)}
_TENSORFLOW_TRAINER: Names = {"distrain.tensorflow": ("TensorflowTrainer",)}
_TORCH_TRAINER: Names = {"distrain.torch": ("TorchTrainer",)}
_WANDB: Names = {"distrain.as_ray.integrations": ("WandbLoggerCallback=wandb_callback", "setup_wandb")}

_CORE: dict[str, Home] = {
    "ray": {"distrain.as_ray.constants": ("__version__", "__distrain__")},
    "ray.cloudpickle": "cloudpickle",
}
_TRAIN: dict[str, Home] = {
    "ray.train": {
        **_BACKEND,
        **_CHECKPOINT,
        **_RESULT,
        "distrain.as_ray.constants": ("SyncConfig", "TRAIN_DATASET_KEY", "ValidationFn"),
        "distrain.config": _CONFIGS,
        "distrain.context": _CONTEXT,
        "distrain.errors": _ERRORS,
        "distrain.session": _IN_WORKER,
    },
    "ray.train._checkpoint": _CHECKPOINT,
    "ray.train._internal.data_config": {"distrain.config": ("DataConfig",)},
    "ray.train._internal.session": "distrain.session",
    "ray.train._internal.syncer": {"distrain.as_ray.constants": ("SyncConfig",)},
    "ray.train.backend": _BACKEND,
    "ray.train.base_trainer": {"distrain.errors": ("TrainingFailedError",)},
    "ray.train.checkpoint": _CHECKPOINT,
    "ray.train.collective": "distrain.collective",
    "ray.train.constants": {"distrain.as_ray.constants": ("TRAIN_DATASET_KEY",)},
    "ray.train.context": {"distrain.context": ("TrainContext",), "distrain.session": ("get_context",)},
    "ray.train.data_parallel_trainer": _DATA_PARALLEL_TRAINER,
    "ray.train.huggingface": {},
    "ray.train.huggingface.transformers": "distrain.huggingface.transformers",
    "ray.train.huggingface.transformers._transformers_utils": "distrain.huggingface.transformers",
    "ray.train.lightning": "distrain.lightning",
    "ray.train.lightning._lightning_utils": "distrain.lightning",
    "ray.train.session": "distrain.session",
    "ray.train.tensorflow": "distrain.tensorflow",
    "ray.train.tensorflow.config": {"distrain.tensorflow": ("TensorflowConfig",)},
    "ray.train.tensorflow.keras": _KERAS,
    "ray.train.tensorflow.tensorflow_checkpoint": {"distrain.tensorflow": ("TensorflowCheckpoint",)},
    "ray.train.tensorflow.tensorflow_trainer": _TENSORFLOW_TRAINER,
    "ray.train.tensorflow.train_loop_utils": {"distrain.tensorflow": ("prepare_dataset_shard",)},
    "ray.train.torch": "distrain.torch",
    "ray.train.torch.config": {"distrain.torch": ("TorchConfig",)},
    "ray.train.torch.torch_checkpoint": {"distrain.torch": ("TorchCheckpoint",)},
    "ray.train.torch.torch_trainer": _TORCH_TRAINER,
    "ray.train.torch.train_loop_utils": "distrain.torch",
    "ray.train.trainer": {},
}
_TRAIN_V2: dict[str, Home] = {
    "ray.train.v2.api.callback": {"distrain.config": ("UserCallback",)},
    "ray.train.v2.api.config": {"distrain.config": _CONFIGS},
    "ray.train.v2.api.context": {"distrain.context": ("TrainContext",)},
    "ray.train.v2.api.data_parallel_trainer": _DATA_PARALLEL_TRAINER,
    "ray.train.v2.api.exceptions": {"distrain.errors": _ERRORS},
    "ray.train.v2.api.report_config": {
        "distrain.config": ("CheckpointUploadMode",),
        "distrain.context": ("CheckpointConsistencyMode",),
    },
    "ray.train.v2.api.reported_checkpoint": {"distrain.context": ("ReportedCheckpoint", "ReportedCheckpointStatus")},
    "ray.train.v2.api.result": _RESULT,
    "ray.train.v2.api.train_fn_utils": {"distrain.session": _IN_WORKER},
    "ray.train.v2.api.validation_config": {
        "distrain.as_ray.constants": ("ValidationFn",),
        "distrain.config": ("ValidationConfig", "ValidationTaskConfig"),
    },
    "ray.train.v2.tensorflow.tensorflow_trainer": _TENSORFLOW_TRAINER,
    "ray.train.v2.torch.torch_trainer": _TORCH_TRAINER,
    "ray.train.v2.torch.train_loop_utils": "distrain.torch",
}
_AIR: dict[str, Home] = {
    "ray.air": {**_AIR_CONFIG, **_CHECKPOINT, **_RESULT},
    "ray.air.checkpoint": _CHECKPOINT,
    "ray.air.config": _AIR_CONFIG,
    "ray.air.integrations.keras": _KERAS,
    "ray.air.integrations.mlflow": _MLFLOW,
    "ray.air.integrations.wandb": _WANDB,
    "ray.air.result": _RESULT,
    "ray.air.session": "distrain.session",
    "ray.tune.logger": {
        "distrain.as_ray.integrations": ("TBXLoggerCallback=tensorboard_callback",),
        "distrain.config": ("CSVLoggerCallback=UserCallback", "JsonLoggerCallback=UserCallback"),
    },
    "ray.tune.logger.mlflow": _MLFLOW,
    "ray.tune.logger.wandb": _WANDB,
}

MODULES: dict[str, Home] = {**_CORE, **_TRAIN, **_TRAIN_V2, **_AIR}
"""Each module of Ray, with its names by the module that they come from; ``Name=other`` renames one.

A module's name instead stands for all names of that module.
"""

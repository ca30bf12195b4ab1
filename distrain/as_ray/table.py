"""The names of Ray, and where each comes from. Runs in: anywhere."""

from __future__ import annotations

from typing import TypeAlias

Home: TypeAlias = "str | dict[str, tuple[str, ...]]"

_CONFIGS = (
    "CheckpointConfig",
    "CheckpointUploadMode",
    "DataConfig",
    "FailureConfig",
    "LoggingConfig",
    "RunConfig",
    "ScalingConfig",
    "UserCallback",
    "ValidationConfig",
    "ValidationTaskConfig",
)
_CONTEXT = ("CheckpointConsistencyMode", "ReportedCheckpoint", "ReportedCheckpointStatus", "TrainContext")
_ERRORS = ("ControllerError", "PreemptionError", "TrainingFailedError", "WorkerGroupError")
_IN_WORKER = ("get_all_reported_checkpoints", "get_checkpoint", "get_context", "get_dataset_shard", "report")
_PLAIN = ("SyncConfig", "TRAIN_DATASET_KEY", "ValidationFn")

_TRAIN: Home = {
    "distrain.backend": ("BackendConfig",),
    "distrain.checkpoint": ("Checkpoint",),
    "distrain.config": _CONFIGS,
    "distrain.context": _CONTEXT,
    "distrain.errors": (*_ERRORS, "NCCLHangError=HangError"),
    "distrain.result": ("Result",),
    "distrain.session": _IN_WORKER,
    "distrain.as_ray.constants": _PLAIN,
}
_AIR_CONFIG: Home = {
    "distrain.config": ("CheckpointConfig", "DataConfig", "FailureConfig", "RunConfig", "ScalingConfig"),
    "distrain.as_ray.constants": ("SyncConfig",),
}
_DATA_PARALLEL: Home = {"distrain.trainer": ("DataParallelTrainer",)}

_DATASETS: Home = {
    "distrain.as_ray.dataset": ("Dataset", "MaterializedDataset=Dataset"),
    "distrain.data": ("Schema",),
}
_EXECUTION: Home = {"distrain.as_ray.data": ("DataContext", "ExecutionOptions", "ExecutionResources")}
_PARTITIONING: Home = {"distrain.as_ray.data": ("Partitioning",)}
_READERS = (
    "ActorPoolStrategy",
    "DataContext",
    "DatasetContext=DataContext",
    "ExecutionOptions",
    "ExecutionResources",
    "TaskPoolStrategy",
    "from_arrow",
    "from_huggingface",
    "from_items",
    "from_numpy",
    "from_pandas",
    "from_torch",
    "range",
    "range_tensor",
    "read_binary_files",
    "read_csv",
    "read_images",
    "read_json",
    "read_numpy",
    "read_parquet",
    "read_text",
)
_PREPROCESSORS = (
    "BatchMapper",
    "Chain",
    "Concatenator",
    "LabelEncoder",
    "MinMaxScaler",
    "OneHotEncoder",
    "OrdinalEncoder",
    "SimpleImputer",
    "StandardScaler",
)
_PREPROCESSOR = ("Preprocessor", "PreprocessorNotFittedException")

MODULES: dict[str, Home] = {
    # -- the core of Ray ----------------------------------------------------------------------------------------
    "ray": {"distrain.as_ray.constants": ("__version__", "__distrain__")},
    "ray.cloudpickle": "cloudpickle",
    # -- Train --------------------------------------------------------------------------------------------------
    "ray.train": _TRAIN,
    "ray.train.backend": {"distrain.backend": ("BackendConfig",)},
    "ray.train.base_trainer": {"distrain.errors": ("TrainingFailedError",)},
    "ray.train.checkpoint": {"distrain.checkpoint": ("Checkpoint",)},
    "ray.train._checkpoint": {"distrain.checkpoint": ("Checkpoint",)},
    "ray.train.collective": "distrain.collective",
    "ray.train.context": {
        "distrain.context": ("TrainContext",),
        "distrain.session": ("get_context",),
    },
    "ray.train.data_parallel_trainer": _DATA_PARALLEL,
    "ray.train.huggingface": {},
    "ray.train.huggingface.transformers": "distrain.huggingface.transformers",
    "ray.train.lightning": "distrain.lightning",
    "ray.train.session": "distrain.session",
    "ray.train.tensorflow": "distrain.tensorflow",
    "ray.train.tensorflow.config": {"distrain.tensorflow": ("TensorflowConfig",)},
    "ray.train.tensorflow.keras": "distrain.tensorflow.keras",
    "ray.train.tensorflow.tensorflow_trainer": {"distrain.tensorflow": ("TensorflowTrainer",)},
    "ray.train.torch": "distrain.torch",
    "ray.train.torch.config": {"distrain.torch": ("TorchConfig",)},
    "ray.train.torch.torch_checkpoint": {"distrain.torch": ("TorchCheckpoint",)},
    "ray.train.torch.torch_trainer": {"distrain.torch": ("TorchTrainer",)},
    "ray.train.torch.train_loop_utils": "distrain.torch",
    "ray.train.v2.api": {},
    # -- Data ---------------------------------------------------------------------------------------------------
    "ray.data": {
        "distrain.as_ray.data": _READERS,
        "distrain.as_ray.dataset": ("Dataset", "MaterializedDataset=Dataset"),
        "distrain.as_ray.preprocessors": ("Preprocessor",),
        "distrain.data": ("DataIterator", "DatasetIterator=DataIterator", "Schema"),
    },
    "ray.data.context": _EXECUTION,
    "ray.data.dataset": _DATASETS,
    "ray.data.datasource": _PARTITIONING,
    "ray.data.datasource.partitioning": _PARTITIONING,
    "ray.data.grouped_data": {"distrain.as_ray.groups": ("GroupedData",)},
    "ray.data.iterator": {"distrain.data": ("DataIterator",)},
    "ray.data.preprocessor": {"distrain.as_ray.preprocessors": _PREPROCESSOR},
    "ray.data.preprocessors": {"distrain.as_ray.preprocessors": _PREPROCESSORS},
    # -- AIR, the former name ------------------------------------------------------------------------------------
    "ray.air": {**_AIR_CONFIG, "distrain.checkpoint": ("Checkpoint",), "distrain.result": ("Result",)},
    "ray.air.checkpoint": {"distrain.checkpoint": ("Checkpoint",)},
    "ray.air.config": _AIR_CONFIG,
    "ray.air.integrations.keras": {"distrain.tensorflow.keras": ("ReportCheckpointCallback",)},
    "ray.air.result": {"distrain.result": ("Result",)},
    "ray.air.session": "distrain.session",
}
"""Each module of Ray, with its names by the module that they come from; ``Name=other`` renames one.

A module's name instead stands for all names of that module.
"""

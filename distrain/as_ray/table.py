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
_READERS = (
    *("ActorPoolStrategy=WithoutEffect", "DataContext", "DatasetContext=DataContext"),
    *("ExecutionOptions=WithoutEffect", "ExecutionResources=WithoutEffect", "TaskPoolStrategy=WithoutEffect"),
    *("from_arrow", "from_huggingface", "from_items", "from_numpy", "from_pandas", "from_torch", "range"),
    *("read_csv", "read_images", "read_json", "read_parquet", "read_text"),
)

_AIR_CONFIG: Names = {
    "distrain.as_ray.constants": ("SyncConfig",),
    "distrain.api.config": ("CheckpointConfig", "DataConfig", "FailureConfig", "RunConfig", "ScalingConfig"),
}
_BACKEND: Names = {"distrain.api.backend": ("BackendConfig",)}
_CHECKPOINT: Names = {"distrain.storage.checkpoint": ("Checkpoint",)}
_DATA_PARALLEL_TRAINER: Names = {"distrain.coordinator.trainer": ("DataParallelTrainer",)}
_DATASET: Names = {"distrain.as_ray.data.dataset": ("Dataset", "MaterializedDataset=Dataset")}
_KERAS: Names = {
    "distrain.tensorflow.keras": ("ReportCheckpointCallback", "RayReportCallback=ReportCheckpointCallback")
}
_MLFLOW: Names = {"distrain.as_ray.integrations": ("MLflowLoggerCallback=mlflow_callback", "setup_mlflow")}
_RESULT: Names = {"distrain.api.result": ("Result",)}
_TENSORFLOW_TRAINER: Names = {"distrain.tensorflow": ("TensorflowTrainer",)}
_TORCH_TRAINER: Names = {"distrain.torch": ("TorchTrainer",)}
_WANDB: Names = {"distrain.as_ray.integrations": ("WandbLoggerCallback=wandb_callback", "setup_wandb")}

_NEVER_RAISED = (
    *("ActorUnavailableError", "GetTimeoutError", "LocalRayletDiedError", "NodeDiedError", "ObjectFetchTimedOutError"),
    *("ObjectFreedError", "ObjectLostError", "ObjectReconstructionFailedError", "ObjectStoreFullError"),
    *("OutOfDiskError", "OutOfMemoryError", "OwnerDiedError", "PendingCallsLimitExceeded", "RayChannelError"),
    *("RaySystemError", "RpcError", "RuntimeEnvSetupError", "TaskCancelledError", "TaskUnschedulableError"),
    *("ActorAlreadyExistsError", "WorkerCrashedError"),
)
_EXCEPTIONS = (
    *("ActorDiedError", "RayActorError", "RayError", "RayTaskError"),
    *(f"{name}=NeverRaisedError" for name in _NEVER_RAISED),
)
_SPACE = (
    *("choice", "grid_search", "lograndint", "loguniform", "qlograndint", "qloguniform", "qrandint", "qrandn"),
    *("quniform", "randint", "randn", "sample_from", "uniform"),
)

_CORE: dict[str, Home] = {
    "ray": {
        "distrain.as_ray.constants": ("__version__", "__distrain__"),
        "distrain.as_ray.core.actors": ("get_actor", "kill", "method", "remote"),
        "distrain.as_ray.core.cluster": (
            *("available_resources=cluster_resources", "cluster_resources", "get_gpu_ids", "get_runtime_context"),
            *("init", "is_initialized", "nodes", "shutdown"),
        ),
        "distrain.as_ray.core.tasks": ("ObjectRef", "cancel", "get", "put", "wait"),
    },
    "ray.actor": {"distrain.as_ray.core.actors": ("ActorClass", "ActorHandle")},
    "ray.cloudpickle": "cloudpickle",
    "ray.exceptions": {"distrain.as_ray.core.exceptions": _EXCEPTIONS},
    "ray.remote_function": {"distrain.as_ray.core.tasks": ("RemoteFunction",)},
    "ray.runtime_context": {"distrain.as_ray.core.cluster": ("RuntimeContext", "get_runtime_context")},
    "ray.runtime_env": {"distrain.as_ray.core.cluster": ("RuntimeEnv",)},
    "ray.util": {"distrain.hosts.network": ("get_node_ip_address=own_address",)},
}
_DATA: dict[str, Home] = {
    "ray.data": {
        **_DATASET,
        "distrain.as_ray.data.readers": _READERS,
        "distrain.as_ray.data.writing": ("SaveMode",),
        "distrain.data": ("DataIterator", "DatasetIterator=DataIterator", "Schema"),
    },
    "ray.data.collate_fn": {
        "distrain.as_ray.data.collate_fn": (
            *("ArrowBatchCollateFn", "CollateFn", "DefaultCollateFn", "NumpyBatchCollateFn", "PandasBatchCollateFn"),
        )
    },
    "ray.data.context": {"distrain.as_ray.data.readers": ("DataContext",)},
    "ray.data.dataset": {**_DATASET, "distrain.data": ("Schema",)},
    "ray.data.grouped_data": {"distrain.as_ray.data.groups": ("GroupedData",)},
    "ray.data.iterator": {"distrain.data": ("DataIterator",)},
}
_TRAIN: dict[str, Home] = {
    "ray.train": {
        **_BACKEND,
        **_CHECKPOINT,
        **_RESULT,
        "distrain.as_ray.constants": ("SyncConfig", "TRAIN_DATASET_KEY", "ValidationFn"),
        "distrain.as_ray.preemption": ("PreemptionInfo", "get_preemption_info"),
        "distrain.api.config": _CONFIGS,
        "distrain.api.context": _CONTEXT,
        "distrain.errors": _ERRORS,
        "distrain.session": _IN_WORKER,
    },
    "ray.train._checkpoint": _CHECKPOINT,
    "ray.train._internal.data_config": {"distrain.api.config": ("DataConfig",)},
    "ray.train._internal.session": "distrain.session",
    "ray.train._internal.syncer": {"distrain.as_ray.constants": ("SyncConfig",)},
    "ray.train.backend": _BACKEND,
    "ray.train.base_trainer": {"distrain.errors": ("TrainingFailedError",)},
    "ray.train.checkpoint": _CHECKPOINT,
    "ray.train.collective": "distrain.collective",
    "ray.train.constants": {"distrain.as_ray.constants": ("TRAIN_DATASET_KEY",)},
    "ray.train.context": {"distrain.api.context": ("TrainContext",), "distrain.session": ("get_context",)},
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
    "ray.train.trainer": {"distrain.errors": ("TrainingFailedError",)},
}
_TRAIN_V2: dict[str, Home] = {
    "ray.train.v2.api.callback": {"distrain.api.config": ("UserCallback",)},
    "ray.train.v2.api.config": {"distrain.api.config": _CONFIGS},
    "ray.train.v2.api.context": {"distrain.api.context": ("TrainContext",)},
    "ray.train.v2.api.data_parallel_trainer": _DATA_PARALLEL_TRAINER,
    "ray.train.v2.api.exceptions": {"distrain.errors": _ERRORS},
    "ray.train.v2.api.report_config": {
        "distrain.api.config": ("CheckpointUploadMode",),
        "distrain.api.context": ("CheckpointConsistencyMode",),
    },
    "ray.train.v2.api.preemption": {"distrain.as_ray.preemption": ("PreemptionInfo",)},
    "ray.train.v2.api.reported_checkpoint": {
        "distrain.api.context": ("ReportedCheckpoint", "ReportedCheckpointStatus")
    },
    "ray.train.v2.api.result": _RESULT,
    "ray.train.v2.api.train_fn_utils": {
        "distrain.as_ray.preemption": ("get_preemption_info",),
        "distrain.session": _IN_WORKER,
    },
    "ray.train.v2.api.validation_config": {
        "distrain.as_ray.constants": ("ValidationFn",),
        "distrain.api.config": ("ValidationConfig", "ValidationTaskConfig"),
    },
    "ray.train.v2.jax": "distrain.jax",
    "ray.train.v2.jax.config": {"distrain.jax": ("JaxConfig",)},
    "ray.train.v2.jax.jax_trainer": {"distrain.jax": ("JaxTrainer",)},
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
        "distrain.api.config": ("CSVLoggerCallback=UserCallback", "JsonLoggerCallback=UserCallback"),
    },
    "ray.tune.logger.mlflow": _MLFLOW,
    "ray.tune.logger.wandb": _WANDB,
}

_TUNE: dict[str, Home] = {
    "ray.tune": {
        **_CHECKPOINT,
        **_RESULT,
        "distrain.as_ray.constants": ("SyncConfig",),
        "distrain.as_ray.tune.context": ("get_context",),
        "distrain.as_ray.tune.search_space": _SPACE,
        "distrain.as_ray.tune.sweep": ("ResultGrid",),
        "distrain.as_ray.tune.tuner": (
            *("CLIReporter", "JupyterNotebookReporter=CLIReporter", "ProgressReporter=CLIReporter"),
            *("TuneConfig", "Tuner"),
        ),
        "distrain.as_ray.tune.trainables": (
            *("RunConfig=TuneRunConfig", "report", "with_parameters", "with_resources"),
        ),
        "distrain.api.config": ("CheckpointConfig", "FailureConfig"),
        "distrain.api.context": ("TuneContext=TrainContext",),
        "distrain.errors": ("TuneError=TrainingFailedError",),
        "distrain.session": ("get_checkpoint",),
    },
    "ray.tune.integration.ray_train": {"distrain.as_ray.tune.trainables": ("TuneReportCallback",)},
    "ray.tune.result_grid": {"distrain.as_ray.tune.sweep": ("ResultGrid",)},
    "ray.tune.schedulers": {"distrain.as_ray.tune.tuner": ("FIFOScheduler",)},
    "ray.tune.search": {"distrain.as_ray.tune.tuner": ("BasicVariantGenerator",)},
    "ray.tune.search.basic_variant": {"distrain.as_ray.tune.tuner": ("BasicVariantGenerator",)},
    "ray.tune.search.sample": {"distrain.as_ray.tune.search_space": ("Domain", *_SPACE)},
    "ray.tune.trainable": {"distrain.as_ray.tune.trainables": ("with_parameters", "with_resources")},
    "ray.tune.tune_config": {"distrain.as_ray.tune.tuner": ("TuneConfig",)},
    "ray.tune.tuner": {"distrain.as_ray.tune.tuner": ("TuneConfig", "Tuner")},
}

MODULES: dict[str, Home] = {**_CORE, **_DATA, **_TRAIN, **_TRAIN_V2, **_AIR, **_TUNE}
"""Each module of Ray, with its names by the module that they come from; ``Name=other`` renames one.

A module's name instead stands for all names of that module.
"""

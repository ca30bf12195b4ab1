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

_ACTORS = ("get_actor", "kill", "method", "remote")
_CLUSTER = (
    "cluster_resources",
    "get_gpu_ids",
    "get_runtime_context",
    "init",
    "is_initialized",
    "nodes",
    "shutdown",
)
_TASKS = ("ObjectRef", "cancel", "get", "put", "wait")

_SPACE = (
    "choice",
    "grid_search",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "sample_from",
    "uniform",
)
_TUNER = ("CLIReporter", "PlacementGroupFactory", "TuneConfig", "Tuner", "report", "with_parameters", "with_resources")
_TUNE: Home = {
    "distrain.checkpoint": ("Checkpoint",),
    "distrain.config": ("CheckpointConfig", "FailureConfig", "RunConfig"),
    "distrain.context": ("TuneContext=TrainContext",),
    "distrain.errors": ("TuneError=TrainingFailedError",),
    "distrain.result": ("Result",),
    "distrain.session": ("get_checkpoint", "get_context"),
    "distrain.as_ray.constants": ("SyncConfig",),
    "distrain.as_ray.search_space": _SPACE,
    "distrain.as_ray.sweep": ("ResultGrid",),
    "distrain.as_ray.tuner": (
        *_TUNER,
        "JupyterNotebookReporter=CLIReporter",
        "ProgressReporter=CLIReporter",
    ),
}

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

MODULES: dict[str, Home] = {
    # -- the core of Ray ----------------------------------------------------------------------------------------
    "ray": {
        "distrain.as_ray.constants": ("__version__", "__distrain__"),
        "distrain.as_ray.cluster": (*_CLUSTER, "available_resources=cluster_resources"),
        "distrain.as_ray.actors": _ACTORS,
        "distrain.as_ray.tasks": _TASKS,
    },
    "ray.actor": {"distrain.as_ray.actors": ("ActorClass", "ActorHandle", "exit_actor")},
    "ray.exceptions": "distrain.as_ray.exceptions",
    "ray.remote_function": {"distrain.as_ray.tasks": ("RemoteFunction",)},
    "ray.runtime_context": {"distrain.as_ray.cluster": ("RuntimeContext", "get_runtime_context")},
    "ray.runtime_env": {"distrain.as_ray.cluster": ("RuntimeEnv",)},
    "ray.util": {
        "distrain.as_ray.actors": ("ActorPool", "list_named_actors"),
        "distrain.as_ray.tasks": ("as_completed", "map_unordered"),
        "distrain.hosts.network": ("get_node_ip_address=own_address",),
    },
    "ray.util.actor_pool": {"distrain.as_ray.actors": ("ActorPool",)},
    # -- Tune ---------------------------------------------------------------------------------------------------
    "ray.tune": _TUNE,
    "ray.tune.integration.ray_train": {"distrain.as_ray.tuner": ("TuneReportCallback",)},
    "ray.tune.result_grid": {"distrain.as_ray.sweep": ("ResultGrid",)},
    "ray.tune.schedulers": {"distrain.as_ray.tuner": ("FIFOScheduler",)},
    "ray.tune.search": {"distrain.as_ray.tuner": ("BasicVariantGenerator",)},
    "ray.tune.search.basic_variant": {"distrain.as_ray.tuner": ("BasicVariantGenerator",)},
    "ray.tune.search.sample": {"distrain.as_ray.search_space": ("Domain", *_SPACE)},
    "ray.tune.tune_config": {"distrain.as_ray.tuner": ("TuneConfig",)},
    "ray.tune.tuner": {"distrain.as_ray.tuner": ("Tuner",)},
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

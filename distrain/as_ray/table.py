"""The names of Ray, and where each comes from. Runs in: anywhere."""

from __future__ import annotations

from typing import TypeAlias

Home: TypeAlias = "str | dict[str, str]"

_SPACE = """
    choice grid_search lograndint loguniform qlograndint qloguniform qrandint qrandn quniform randint randn sample_from
    uniform
"""
_NEVER_RAISED = """
    ActorAlreadyExistsError ActorUnavailableError GetTimeoutError LocalRayletDiedError NodeDiedError
    ObjectFetchTimedOutError ObjectFreedError ObjectLostError ObjectReconstructionFailedError ObjectStoreFullError
    OutOfDiskError OutOfMemoryError OwnerDiedError PendingCallsLimitExceeded RayChannelError RaySystemError RpcError
    RuntimeEnvSetupError TaskCancelledError TaskUnschedulableError WorkerCrashedError
"""

_CORE: dict[str, Home] = {
    "ray": {
        "distrain.as_ray.constants": "__version__ __distrain__",
        "distrain.as_ray.core.actors": "get_actor kill remote",
        "distrain.as_ray.core.cluster": """
            available_resources=cluster_resources cluster_resources get_runtime_context=RuntimeContext init
            is_initialized nodes shutdown""",
        "distrain.as_ray.core.tasks": "ObjectRef cancel get put wait",
    },
    "ray.actor": {"distrain.as_ray.core.actors": "ActorClass ActorHandle"},
    "ray.cloudpickle": "cloudpickle",
    "ray.exceptions": {
        "distrain.as_ray.core.exceptions": " ".join(
            ["ActorDiedError RayActorError RayError RayTaskError"]
            + [f"{name}=NeverRaisedError" for name in _NEVER_RAISED.split()]
        )
    },
    "ray.remote_function": {"distrain.as_ray.core.tasks": "RemoteFunction"},
    "ray.runtime_context": {"distrain.as_ray.core.cluster": "RuntimeContext get_runtime_context=RuntimeContext"},
    "ray.runtime_env": {"distrain.as_ray.core.cluster": "RuntimeEnv"},
    "ray.util": {"distrain.hosts.network": "get_node_ip_address=own_address"},
}
_DATA: dict[str, Home] = {
    "ray.data": {
        "distrain.as_ray.data.dataset": "Dataset MaterializedDataset=Dataset",
        "distrain.as_ray.data.readers": """
            ActorPoolStrategy=WithoutEffect DataContext DatasetContext=DataContext ExecutionOptions=WithoutEffect
            ExecutionResources=WithoutEffect FileShuffleConfig=WithoutEffect TaskPoolStrategy=WithoutEffect from_arrow
            from_huggingface from_items from_numpy from_pandas from_torch range read_csv read_images read_json
            read_parquet read_text""",
        "distrain.data": "DataIterator DatasetIterator=DataIterator Schema",
    },
    "ray.data.grouped_data": {"distrain.as_ray.data.dataset": "GroupedData"},
}
_TRAIN: dict[str, Home] = {
    "ray.train": {
        "distrain.api.backend": "BackendConfig",
        "distrain.api.config": """
            CheckpointConfig CheckpointUploadMode FailureConfig LoggingConfig ScalingConfig UserCallback
            ValidationConfig ValidationTaskConfig""",
        "distrain.api.context": "CheckpointConsistencyMode ReportedCheckpoint ReportedCheckpointStatus TrainContext",
        "distrain.api.result": "Result",
        "distrain.as_ray.constants": "SyncConfig=WithoutEffect TRAIN_DATASET_KEY ValidationFn",
        "distrain.as_ray.data.readers": "DataConfig",
        "distrain.as_ray.tune.trainables": "RunConfig",
        "distrain.coordinator.trainer": "DataParallelTrainer",
        "distrain.errors": """
            ControllerError NCCLHangError=HangError PreemptionError TrainingFailedError WorkerGroupError""",
        "distrain.session": """
            get_all_reported_checkpoints get_checkpoint get_context get_dataset_shard report""",
        "distrain.storage.checkpoint": "Checkpoint",
    },
    "ray.train.collective": "distrain.collective",
    "ray.train.huggingface": {},
    "ray.train.huggingface.transformers": "distrain.huggingface.transformers",
    "ray.train.lightgbm": {
        "distrain.api.backend": "LightGBMConfig=BackendConfig",
        "distrain.coordinator.trainer": "LightGBMTrainer=DataParallelTrainer",
        "distrain.lightgbm": "RayTrainReportCallback get_network_params",
    },
    "ray.train.lightning": "distrain.lightning",
    "ray.train.session": "distrain.session",
    "ray.train.tensorflow": "distrain.tensorflow",
    "ray.train.tensorflow.keras": {
        "distrain.tensorflow.keras": "ReportCheckpointCallback RayReportCallback=ReportCheckpointCallback"
    },
    "ray.train.torch": "distrain.torch",
    "ray.train.v2.jax": "distrain.jax",
    "ray.train.xgboost": "distrain.xgboost",
}
_TUNE: dict[str, Home] = {
    "ray.tune": {
        "distrain.api.config": "CheckpointConfig FailureConfig",
        "distrain.api.context": "TuneContext=TrainContext",
        "distrain.api.result": "Result",
        "distrain.as_ray.constants": """
            CLIReporter=WithoutEffect JupyterNotebookReporter=WithoutEffect ProgressReporter=WithoutEffect
            SyncConfig=WithoutEffect""",
        "distrain.as_ray.tune.search_space": _SPACE,
        "distrain.as_ray.tune.sweep": "ResultGrid",
        "distrain.as_ray.tune.tuner": "TuneConfig Tuner",
        "distrain.as_ray.tune.trainables": "RunConfig report with_parameters with_resources",
        "distrain.errors": "TuneError=TrainingFailedError",
        "distrain.session": "get_checkpoint get_context",
        "distrain.storage.checkpoint": "Checkpoint",
    },
    "ray.tune.integration.ray_train": {"distrain.as_ray.tune.trainables": "TuneReportCallback"},
    "ray.tune.logger": {
        "distrain.api.config": "CSVLoggerCallback=UserCallback JsonLoggerCallback=UserCallback",
        "distrain.as_ray.integrations": """
            MLflowLoggerCallback=mlflow_callback WandbLoggerCallback=wandb_callback setup_mlflow setup_wandb""",
        "distrain.trackers.tensorboard": "TBXLoggerCallback=TensorBoard",
    },
    "ray.tune.schedulers": {"distrain.as_ray.tune.tuner": "FIFOScheduler"},
    "ray.tune.search": {"distrain.as_ray.tune.tuner": "BasicVariantGenerator"},
    "ray.tune.search.sample": {"distrain.as_ray.tune.search_space": f"Domain {_SPACE}"},
}
_NAMED: dict[str, Home] = {**_CORE, **_DATA, **_TRAIN, **_TUNE}

_ALIKE = {
    "ray.data": "ray.data.context ray.data.dataset ray.data.iterator",
    "ray.train": """
        ray.air ray.air.checkpoint ray.air.config ray.air.result ray.train._checkpoint ray.train._internal.data_config
        ray.train._internal.syncer ray.train.backend ray.train.base_trainer ray.train.checkpoint ray.train.constants
        ray.train.context ray.train.data_parallel_trainer ray.train.trainer ray.train.v2.api.callback
        ray.train.v2.api.config ray.train.v2.api.context ray.train.v2.api.data_parallel_trainer
        ray.train.v2.api.exceptions ray.train.v2.api.preemption ray.train.v2.api.report_config
        ray.train.v2.api.reported_checkpoint ray.train.v2.api.result ray.train.v2.api.train_fn_utils
        ray.train.v2.api.validation_config""",
    "ray.train.huggingface.transformers": "ray.train.huggingface.transformers._transformers_utils",
    "ray.train.lightgbm": "ray.train.v2.lightgbm.lightgbm_trainer",
    "ray.train.lightning": "ray.train.lightning._lightning_utils",
    "ray.train.session": "ray.air.session ray.train._internal.session",
    "ray.train.tensorflow": """
        ray.train.tensorflow.config ray.train.tensorflow.tensorflow_checkpoint
        ray.train.tensorflow.tensorflow_trainer ray.train.tensorflow.train_loop_utils
        ray.train.v2.tensorflow.tensorflow_trainer""",
    "ray.train.tensorflow.keras": "ray.air.integrations.keras",
    "ray.train.torch": """
        ray.train.torch.config ray.train.torch.torch_checkpoint ray.train.torch.torch_trainer
        ray.train.torch.train_loop_utils ray.train.v2.torch.torch_trainer ray.train.v2.torch.train_loop_utils""",
    "ray.train.v2.jax": "ray.train.v2.jax.config ray.train.v2.jax.jax_trainer",
    "ray.train.xgboost": "ray.train.v2.xgboost.config ray.train.v2.xgboost.xgboost_trainer",
    "ray.tune": "ray.tune.result_grid ray.tune.trainable ray.tune.tune_config ray.tune.tuner",
    "ray.tune.logger": """
        ray.air.integrations.mlflow ray.air.integrations.wandb ray.tune.logger.mlflow ray.tune.logger.wandb""",
    "ray.tune.search": "ray.tune.search.basic_variant",
}
"""By module: others whose names are among those of it, and which have all of them here."""

MODULES: dict[str, Home] = _NAMED | {
    other: _NAMED[module] for module, others in _ALIKE.items() for other in others.split()
}
"""Each module of Ray, with its names by the module that they come from; ``Name=other`` renames one.

A module's name instead stands for all names of that module.
"""

"""The names of Ray, and where each comes from. Runs in: anywhere."""

from __future__ import annotations

NAMES: dict[str, dict[str, str]] = {
    "ray": {
        "distrain.as_ray.constants": "__version__",
        "distrain.as_ray.core": "cluster_resources init is_initialized nodes shutdown",
        "distrain.as_ray.core:cluster_resources": "available_resources",
        "distrain.system:__version__": "__distrain__",
    },
    "ray.cloudpickle": {"cloudpickle": "*"},
    "ray.exceptions": {
        "builtins:Exception": "RayError RayTaskError",
        "distrain.as_ray.core:NeverRaisedError": """
            ActorDiedError ActorUnavailableError GetTimeoutError NodeDiedError ObjectLostError ObjectStoreFullError
            OutOfMemoryError RayActorError RaySystemError RuntimeEnvSetupError TaskCancelledError WorkerCrashedError""",
    },
    "ray.runtime_env": {"builtins:dict": "RuntimeEnv"},
    "ray.util": {"distrain.hosts.network:own_address": "get_node_ip_address"},
    "ray.data": {
        "distrain.as_ray.constants:DataContext": "DataContext DatasetContext",
        "distrain.as_ray.constants:WithoutEffect": """
            ActorPoolStrategy ExecutionOptions ExecutionResources FileShuffleConfig TaskPoolStrategy""",
        "distrain.as_ray.data.dataset": "Dataset",
        "distrain.as_ray.data.dataset:Dataset": "MaterializedDataset",
        "distrain.as_ray.data.readers": """
            from_arrow from_huggingface from_items from_numpy from_pandas from_torch range read_csv read_images
            read_json read_parquet""",
        "distrain.data": "DataIterator Schema",
    },
    "ray.train": {
        "distrain": "*",
        "distrain.api.config:UserCallback": "CSVLoggerCallback JsonLoggerCallback",
        "distrain.as_ray.constants": "DataConfig TRAIN_DATASET_KEY ValidationFn",
        "distrain.as_ray.constants:WithoutEffect": "SyncConfig",
        "distrain.as_ray.integrations:mlflow_callback": "MLflowLoggerCallback",
        "distrain.as_ray.integrations:wandb_callback": "WandbLoggerCallback",
        "distrain.errors:HangError": "NCCLHangError",
        "distrain.session": """
            get_experiment_name get_local_rank get_local_world_size get_node_rank get_trial_dir get_trial_id
            get_trial_name get_trial_resources get_world_rank get_world_size""",
        "distrain.tensorflow.keras:ReportCheckpointCallback": "RayReportCallback ReportCheckpointCallback",
        "distrain.trackers.tensorboard:TensorBoard": "TBXLoggerCallback",
    },
    "ray.train.collective": {"distrain.collective": "*"},
    "ray.train.huggingface.transformers": {"distrain.huggingface.transformers": "*"},
    "ray.train.lightgbm": {
        "distrain.api.backend:BackendConfig": "LightGBMConfig",
        "distrain.coordinator.run.trainer:DataParallelTrainer": "LightGBMTrainer",
        "distrain.lightgbm": "*",
    },
    "ray.train.lightning": {"distrain.lightning": "*"},
    "ray.train.tensorflow": {"distrain.tensorflow": "*"},
    "ray.train.torch": {"distrain.torch": "*"},
    "ray.train.v2.jax": {"distrain.jax": "*"},
    "ray.train.xgboost": {"distrain.xgboost": "*"},
    "ray.tune": {"distrain.errors:TrainingFailedError": "TuneError"},
}
"""Names of Ray by the modules that have them, and by the modules that they come from.

``*`` stands for all names of a module; a name after a colon for one that has other names in Ray. Modules below have the
names of those above, and ``ray.tune`` and ``ray.air`` those of ``ray.train``.
"""

PARTS = """
    _checkpoint _internal _lightning_utils _transformers_utils air api backend base_trainer basic_variant callback
    checkpoint config constants context data_config data_parallel_trainer dataset exceptions integration integrations
    iterator keras logger mlflow preemption ray_train report_config reported_checkpoint result result_grid schedulers
    search session syncer tensorflow_checkpoint tensorflow_trainer torch_checkpoint torch_trainer train_fn_utils
    train_loop_utils trainable trainer tune_config tuner v2 validation_config wandb
"""
"""Modules of Ray below others, whose names are those of the modules above."""

"""The names of Ray: each is a name of ours, or explains in one sentence what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from importlib import import_module

import cloudpickle
import pytest

from distrain.as_ray.importing import homes_of
from distrain.as_ray.sentences import GENERAL
from distrain.as_ray.table import NAMES
from distrain.system.pickling import pickled

PUBLIC = {
    "ray.train": """
        BackendConfig Checkpoint CheckpointConfig CheckpointConsistencyMode CheckpointUploadMode ControllerError
        DataConfig FailureConfig LoggingConfig NCCLHangError PreemptionError PreemptionInfo ReportedCheckpoint
        ReportedCheckpointStatus Result RunConfig ScalingConfig SyncConfig TRAIN_DATASET_KEY TrainContext
        TrainingFailedError UserCallback ValidationConfig ValidationFn ValidationTaskConfig
        WorkerGroupError get_all_reported_checkpoints get_checkpoint get_context get_dataset_shard get_preemption_info
        report""",
    "ray.train.base_trainer": "BaseTrainer TrainingFailedError",
    "ray.train.collective": "barrier broadcast_from_rank_zero",
    "ray.train.huggingface": """
        AccelerateTrainer HuggingFaceCheckpoint HuggingFacePredictor HuggingFaceTrainer LegacyTransformersCheckpoint
        TransformersCheckpoint TransformersPredictor TransformersTrainer""",
    "ray.train.huggingface.transformers": "RayTrainReportCallback TransformersTrainer prepare_trainer",
    "ray.train.horovod": "HorovodConfig HorovodTrainer",
    "ray.train.lightgbm": """
        LightGBMCheckpoint LightGBMConfig LightGBMTrainer RayTrainReportCallback get_network_params""",
    "ray.train.lightning": """
        LegacyLightningCheckpoint LightningCheckpoint LightningConfigBuilder LightningPredictor LightningTrainer
        RayDDPStrategy RayDeepSpeedStrategy RayFSDPStrategy RayLightningEnvironment RayTrainReportCallback
        prepare_trainer""",
    "ray.train.tensorflow": """
        LegacyTensorflowCheckpoint TensorflowCheckpoint TensorflowConfig TensorflowPredictor TensorflowTrainer
        prepare_dataset_shard""",
    "ray.train.torch": """
        LegacyTorchCheckpoint TorchCheckpoint TorchConfig TorchDetectionPredictor TorchPredictor TorchTrainer accelerate
        backward enable_reproducibility get_device get_devices prepare_data_loader prepare_model prepare_optimizer""",
    "ray.train.trainer": "BaseTrainer TrainingFailedError",
    "ray.train.v2.api.config": "CheckpointConfig FailureConfig LoggingConfig RunConfig ScalingConfig",
    "ray.train.v2.api.exceptions": "ControllerError NCCLHangError PreemptionError TrainingFailedError WorkerGroupError",
    "ray.train.xgboost": "RayTrainReportCallback XGBoostCheckpoint XGBoostConfig XGBoostPredictor XGBoostTrainer",
    "ray.tune": """
        CLIReporter Callback Checkpoint CheckpointConfig ExperimentAnalysis FailureConfig
        JupyterNotebookReporter ProgressReporter Result ResultGrid RunConfig Stopper
        SyncConfig Trainable TuneConfig TuneContext TuneError Tuner choice get_checkpoint
        get_context grid_search lograndint loguniform qlograndint qloguniform qrandint qrandn quniform
        randint randn register_trainable report run sample_from uniform with_parameters
        with_resources""",
    "ray.tune.schedulers": "ASHAScheduler FIFOScheduler HyperBandScheduler PopulationBasedTraining",
    "ray.tune.search": "BasicVariantGenerator ConcurrencyLimiter Repeater Searcher",
    "ray.tune.search.optuna": "OptunaSearch",
    "ray.tune.integration.ray_train": "TuneReportCallback",
    "ray": """
        ObjectRef available_resources cancel cluster_resources get get_actor get_gpu_ids
        get_runtime_context init is_initialized kill method nodes put remote shutdown wait""",
    "ray.exceptions": """
        ActorDiedError GetTimeoutError ObjectLostError OutOfMemoryError RayActorError RayError RayTaskError
        TaskCancelledError WorkerCrashedError""",
    "ray.util": """
        ActorPool as_completed collective get_node_ip_address placement_group""",
    "ray.util.multiprocessing": "Pool",
    "ray.util.queue": "Empty Full Queue",
    "ray.util.scheduling_strategies": "NodeAffinitySchedulingStrategy PlacementGroupSchedulingStrategy",
    "ray.air": "Checkpoint CheckpointConfig DatasetConfig FailureConfig Result RunConfig ScalingConfig",
    "ray.air.integrations.comet": "CometLoggerCallback",
    "ray.air.integrations.mlflow": "MLflowLoggerCallback setup_mlflow",
    "ray.air.integrations.wandb": "WandbLoggerCallback setup_wandb",
    "ray.air.session": """
        get_checkpoint get_dataset_shard get_experiment_name get_local_rank get_local_world_size get_node_rank
        get_trial_dir get_trial_id get_trial_name get_trial_resources get_world_rank get_world_size report""",
}
"""The public names of Ray 2.7, 2.9, 2.40 and 2.60 that training scripts may use, by module."""


FRAMEWORKS = ("jax", "lightgbm", "lightning", "tensorflow", "xgboost")


@pytest.mark.parametrize("module", sorted(NAMES))
def test_what_the_table_names_is_there(module: str) -> None:
    for framework in FRAMEWORKS:
        if module == f"ray.train.{framework}":
            pytest.importorskip(framework)
    stand_in = import_module(module)
    for name, (home, own) in homes_of(module).items():
        if name not in FRAMEWORKS and not home.startswith("distrain.tensorflow"):
            assert getattr(stand_in, name) is getattr(import_module(home), own)
        assert name in dir(stand_in)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ray.air", "ScalingConfig"),
        ("ray.air.config", "RunConfig"),
        ("ray.air.session", "get_world_rank"),
        ("ray.data.dataset", "Dataset"),
        ("ray.train._internal.session", "get_checkpoint"),
        ("ray.train.torch.torch_trainer", "TorchTrainer"),
        ("ray.train.v2.api.config", "ScalingConfig"),
        ("ray.tune.config", "ScalingConfig"),
    ],
)
def test_modules_below_others_have_their_names(module: str, name: str) -> None:
    above = import_module(".".join(module.split(".")[:2]))
    if name == "TorchTrainer":
        above = import_module("ray.train.torch")
    assert getattr(import_module(module), name) is getattr(above, name)


def explanation(statement: str) -> str | None:
    """The text of the ImportError of a statement, None if it has none."""
    try:
        exec(statement, {})
    except ImportError as error:
        return str(error)
    return None


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_every_public_name_of_ray_is_there_or_says_what_to_do(module: str) -> None:
    if module in ("ray.train.tensorflow", "ray.train.xgboost"):
        pytest.importorskip(module.rpartition(".")[2])
    texts = {name: explanation(f"from {module} import {name}") for name in PUBLIC[module].split()}
    assert {name: text for name, text in texts.items() if text is not None and GENERAL in text} == {}


@pytest.mark.parametrize(
    ("statement", "error", "text"),
    [
        ("import ray.rllib", ImportError, "ray has no 'rllib' here: distrain does not do reinforcement learning"),
        ("from ray.train.xgboost import XGBoostCheckpoint", ImportError, "use Checkpoint, and load its files with"),
        ("from ray.train.torch import TorchXLAConfig", ImportError, "TPUs are not supported"),
        ("from ray.train._internal.utils import Singleton", ImportError, "it is internal to Ray"),
        ("import ray.train as t; t.nonsense", AttributeError, GENERAL),
        ("import ray; ray.__nonsense__", AttributeError, "module 'ray' has no attribute '__nonsense__'"),
    ],
)
def test_other_names_say_what_to_do(statement: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        exec(statement, {})
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_module_of_the_stand_in_is_pickled_by_its_name() -> None:
    """Whoever unpickles a function that names it imports the stand-in of its own process."""
    import ray.train as module

    for blob in (pickled(module), cloudpickle.dumps(module)):
        assert cloudpickle.loads(blob) is sys.modules["ray.train"]
        assert len(blob) < 200


def test_whoever_asks_if_ray_is_installed_hears_no() -> None:
    import ray  # noqa: F401
    from transformers.integrations import integration_utils

    assert not integration_utils.is_ray_available()
    assert not integration_utils.is_ray_tune_available()

    assert importlib.util.find_spec("ray") is None
    assert importlib.util.find_spec("ray.tune") is None
    assert importlib.util.find_spec("json") is not None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("ray")

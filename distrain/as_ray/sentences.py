"""What the stand-in for Ray lacks, each with a sentence on what to do instead. Runs in: anywhere.

Names that distrain itself lacks, too, are in :mod:`distrain.system.ray_names`.
"""

from __future__ import annotations

from distrain.system.ray_names import MISSING

_CHECKPOINT = "use Checkpoint, whose files are those that you report; load them with the framework's own functions"
_CLUSTER = "there is no cluster: the hosts are those of --hosts, --hostfile or the Slurm job"
_INFERENCE = MISSING["Predictor"]
_PRIVATE = "it is internal to Ray, and there is nothing like it here"
_SEARCH = (
    "schedulers and searchers are left to Optuna: write an objective that calls fit() and returns a metric, and give "
    "it to study.optimize()"
)
_TRACKERS = "set DISTRAIN_TRACKERS, or use --tracker, for TensorBoard, W&B, MLflow or Trackio; see docs/trackers.md"
GENERAL = "distrain's stand-in for Ray has no such name; docs/ray.md says what it has, and how to keep Ray itself"

BELOW = {
    "ray.air.integrations": _TRACKERS,
    "ray.autoscaler": _CLUSTER,
    "ray.cluster_utils": _CLUSTER,
    "ray.dag": "there are no graphs of tasks: call the functions one after the other",
    "ray.job_submission": "there is no cluster to submit to: run the script with `distrain run --as-ray`",
    "ray.ml": "a name of Ray 1: import it from ray.train or ray.air",
    "ray.rllib": MISSING["rllib"],
    "ray.serve": f"{MISSING['serve']}: load the files of result.checkpoint.as_directory()",
    "ray.sgd": MISSING["Trainer"],
    "ray.train.callbacks": f"reports are kept in metrics.jsonl; {_TRACKERS}",
    "ray.train.v2.jax": MISSING["jax"],
    "ray.tune.logger": _TRACKERS,
    "ray.tune.schedulers": _SEARCH,
    "ray.tune.search": _SEARCH,
    "ray.util.sgd": MISSING["Trainer"],
    "ray.workflow": "there are no workflows: call the functions one after the other",
}
"""Sentences for all names at and below a module of Ray."""

NAMES = {
    "Backend": "derive from BackendConfig, whose setup() and teardown() are called in each worker",
    "BaseTrainer": "derive from DataParallelTrainer, or give it a train_func",
    "DatasetConfig": "use DataConfig",
    "HuggingFaceCheckpoint": _CHECKPOINT,
    "HuggingFacePredictor": _INFERENCE,
    "LegacyLightningCheckpoint": _CHECKPOINT,
    "LegacyTensorflowCheckpoint": _CHECKPOINT,
    "LegacyTorchCheckpoint": _CHECKPOINT,
    "LegacyTransformersCheckpoint": _CHECKPOINT,
    "LightningCheckpoint": _CHECKPOINT,
    "LightningPredictor": _INFERENCE,
    "RayTrainCallback": "derive from UserCallback",
    "TrainingIterator": _PRIVATE,
    "TransformersCheckpoint": _CHECKPOINT,
    "TransformersPredictor": _INFERENCE,
    "batch_predictor": _INFERENCE,
    "lightning_trainer": MISSING["LightningTrainer"],
    "mosaic": MISSING["MosaicTrainer"],
    "predictor": _INFERENCE,
    "preemption": MISSING["PreemptionInfo"],
}
"""Sentences for names wherever they are in Ray."""


def why(module: str, name: str) -> str:
    """Return the text of the error for a name that a module of Ray has, or could have, and the stand-in has not."""
    return f"{module} has no {name!r} here: {_sentence(f'{module}.{name}')}"


def _sentence(path: str) -> str:
    words = path.split(".")
    above = (".".join(words[:count]) for count in range(len(words), 1, -1))
    found = next((BELOW[name] for name in above if name in BELOW), None) or {**MISSING, **NAMES}.get(words[-1])
    return found or (_PRIVATE if any(word.startswith("_") for word in words) else GENERAL)

"""Names of Ray that the stand-in lacks, each with a sentence on what to do instead. Runs in: anywhere.

Names that distrain itself lacks, too, are in :mod:`distrain.api.ray_names`.
"""

from __future__ import annotations

from distrain.api.ray_names import MISSING

_CHECKPOINT = "use Checkpoint, whose files are those that you report; load them with the framework's own functions"
_EXAMPLES = "it comes with Ray: copy the file next to your script, and import it from there"
_INFERENCE = MISSING["Predictor"]
_PREPROCESSORS = "transform the rows in map_batches(), with mean() and std() of the dataset, or with scikit-learn"
_PRIVATE = "it is internal to Ray, and there is nothing like it here"
_SEARCH = (
    "schedulers and searchers are left to Optuna, whose objective calls fit() and returns a metric: see "
    "examples/optuna_sweep.py"
)
_PLACEMENT = "hosts are filled in order: ScalingConfig has the number of workers, and what each needs"
_TUNER = "use tune.Tuner(...).fit(), whose ResultGrid has the best result and a dataframe"
_TRACKERS = "set DISTRAIN_TRACKERS, or use --tracker, for TensorBoard, W&B or MLflow; see docs/trackers.md"
GENERAL = "the stand-in has what training needs of Ray, as listed in docs/migration/ray.md"

BELOW = {
    "ray.air.callbacks": _TRACKERS,
    "ray.air.integrations": _TRACKERS,
    "ray.data": (
        "read or compute the data with pandas, Polars, DuckDB, pyarrow or datasets, and pass it to "
        "ray.data.from_pandas(), from_arrow() or from_huggingface()"
    ),
    "ray.data.read_binary_files": "use ray.data.from_items() with the paths, and map() to read each",
    "ray.data.read_numpy": "load the arrays with numpy, and pass them to ray.data.from_numpy()",
    "ray.data.read_webdataset": (
        'pass datasets.load_dataset("webdataset", ...), which can be a stream, to ray.data.from_huggingface()'
    ),
    "ray.data.collate_fn": "pass a function as collate_fn=: it gets a dict of numpy arrays",
    "ray.data.datasource": "add the columns in map_batches(); read_images(include_paths=True) has the path of each row",
    "ray.data.aggregate": "use groupby() and mean(), sum() and the like, or to_pandas() and pandas' groupby()",
    "ray.data.expressions": "write filter(expr=\"x > 0 and y in ['a', 'b']\"), and map_batches() for new columns",
    "ray.data.preprocessor": _PREPROCESSORS,
    "ray.data.preprocessors": _PREPROCESSORS,
    "ray.rllib": MISSING["rllib"],
    "ray.serve": f"{MISSING['serve']}: load the files of result.checkpoint.as_directory()",
    "ray.train.callbacks": f"reports are kept in metrics.jsonl; {_TRACKERS}",
    "ray.train.examples": _EXAMPLES,
    "ray.tune.examples": _EXAMPLES,
    "ray.tune.integration": "report in train_func; distrain.lightning and distrain.tensorflow.keras have callbacks",
    "ray.tune.logger": _TRACKERS,
    "ray.tune.schedulers": _SEARCH,
    "ray.tune.search": _SEARCH,
    "ray.tune.stopper": MISSING["stop"],
    "ray.util.collective": "use ray.train.collective, or torch.distributed in train_func",
    "ray.util.multiprocessing": "multiprocessing.Pool of the standard library has the same methods",
    "ray.util.placement_group": _PLACEMENT,
    "ray.util.queue": "queue.Queue of the standard library serves one process; workers report metrics",
    "ray.util.scheduling_strategies": _PLACEMENT,
}
"""Sentences for all names at and below a module of Ray."""

NAMES = {
    "ActorPool": "call the methods of the actors in turn: each call is done when it returns",
    "ExperimentAnalysis": _TUNER,
    "Stopper": MISSING["stop"],
    "SaveMode": "files are added to a directory: delete it before if they should replace others",
    "as_completed": "call ray.get() with the list of references: all tasks have ended",
    "get_gpu_ids": "CUDA_VISIBLE_DEVICES is as you have set it; a worker's own GPU is ray.train.torch.get_device()",
    "method": "leave it out: the result of an actor's method is one reference, of a tuple if it returns several values",
    "placement_group": _PLACEMENT,
    "register_trainable": "give the function itself to the Tuner",
    "run": _TUNER,
    "Backend": "derive from BackendConfig, whose setup() and teardown() are called in each worker",
    "BaseTrainer": "derive from DataParallelTrainer, or give it a train_func",
    "DatasetConfig": "use DataConfig",
    "RayTrainCallback": "derive from UserCallback",
    "Trainable": "write a function that takes the config, and calls tune.report() in its loop",
}
"""Sentences for names wherever they are in Ray."""

ENDS = {
    "Checkpoint": _CHECKPOINT,
    "Predictor": _INFERENCE,
    "Trainer": "use TorchTrainer or DataParallelTrainer, and call the library in train_func",
    "predictor": _INFERENCE,
}
"""Sentences for names by their ends."""


def why(module: str, name: str) -> str:
    """Return the text of the error for a name that a module of Ray has, or could have, and the stand-in has not."""
    return f"{module} has no {name!r} here: {_sentence(f'{module}.{name}')}"


def _sentence(path: str) -> str:
    words = path.split(".")
    above = (".".join(words[:count]) for count in range(len(words), 1, -1))
    found = next((BELOW[name] for name in above if name in BELOW), None) or {**MISSING, **NAMES}.get(words[-1])
    found = found or next((ENDS[end] for end in ENDS if words[-1].endswith(end)), None)
    return found or (_PRIVATE if any(word.startswith("_") for word in words) else GENERAL)

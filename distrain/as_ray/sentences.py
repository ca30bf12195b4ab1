"""Names and arguments of Ray that the stand-in lacks, each with a sentence on what to do instead. Runs in: anywhere.

Names that distrain itself lacks, too, are in :mod:`distrain.api.ray_names`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from distrain.api.ray_names import MISSING

if TYPE_CHECKING:
    from collections.abc import Mapping

GENERAL = "the stand-in has what training needs of Ray, as listed in docs/migration/ray.md"
_ADVICE = {
    "it comes with Ray: copy the file next to your script, and import it from there": "examples",
    "use Checkpoint, and load its files with the framework's own functions": r"\w*Checkpoint",
    MISSING["Predictor"]: r"\w*[pP]redictor",
    "use TorchTrainer or DataParallelTrainer, whose train_func calls the library": r"\w+Trainer",
    "derive from BackendConfig, whose setup() and teardown() are called in each worker": "Backend",
    "derive from UserCallback": "RayTrainCallback",
    MISSING["stop"]: "stopper|Stopper",
    "report in train_func; distrain.lightning and distrain.tensorflow.keras have callbacks": "tune.integration",
    "use RunConfig(trackers=...) or --tracker, or call wandb.init() or mlflow.start_run() on rank 0": r"setup_\w+",
    "set DISTRAIN_TRACKERS, or use --tracker; see docs/trackers.md": "callbacks|integrations|logger",
    MISSING["tune"]: r"tune\.\w+",
    "hosts are filled in order; see ScalingConfig": "placement_group|scheduling_strategies",
    MISSING["remote"]: "actor|ActorPool|ObjectRef|as_completed|cancel|get|get_actor|kill|method|put|wait",
    "CUDA_VISIBLE_DEVICES is as you have set it; a worker's own GPU is ray.train.torch.get_device()": "get_gpu_ids",
    "use socket.gethostname() and os.getpid(), or ray.train.get_context() in train_func": "get_runtime_context",
    "use ray.train.collective, or torch.distributed in train_func": "util.collective",
    "multiprocessing.Pool of the standard library has the same methods": "multiprocessing",
    "queue.Queue of the standard library serves one process; workers report metrics": "queue",
    "transform the rows in map_batches(), with mean() and std() of the dataset, or with scikit-learn": "preprocessors?",
    "use ray.data.from_items() with paths or lines, and map()": "read_binary_files|read_text|include_paths",
    "give a URL of fsspec, such as s3://bucket/folder, as the path": "arrow_open_stream_args|filesystem",
    "use filter=, with an expression of pyarrow.compute": "filters",
    "pass the list of the files to read, or a pattern": "ignore_missing_paths|partition_filter",
    "leave it out: key=value in a path is a column": "partitioning",
    "files are added to a directory: delete it before if they should replace others": r"SaveMode|write_\w+\.mode",
    "use write_parquet(), or the methods of to_pandas()": r"Dataset\.write_\w+",
    "convert the columns in map_batches()": "schema|tensor_column_schema|dtype|with_columns?",
    "use train_test_split() of scikit-learn with to_pandas(), and ray.data.from_pandas() for both parts": "stratify",
    "use train_test_split(); datasets= of the trainer are divided among the workers": r"\w*split\w*",
    "use random_shuffle().limit(), or filter(lambda row: random.random() < 0.1).materialize()": "random_sample",
    "use random_shuffle(), which also brings the blocks in a random order": "randomize_block_order",
    "it is internal to Ray, and there is nothing like it here": r"ray\..*\._\w+",
    "use DataConfig": "DatasetConfig",
    "use iter_torch_batches()": "to_torch",
    "use to_pandas() before training, and pass what you make of it to ray.data.from_pandas()": r"Dataset\.\w+",
    "use pandas, pyarrow or datasets, and ray.data.from_pandas(), from_arrow() or from_huggingface()": "ray.data",
}
"""By sentence: a pattern of the names, or ends of paths, that it is for. The first one that fits is taken."""

_WITHOUT_EFFECT = """
    compute concurrency lines locality_hints max_retries memory num_blocks num_cpus num_gpus override_num_blocks
    parallelism ray_remote_args ray_remote_args_fn resources runtime_env zero_copy_batch"""
"""Arguments of Ray that say where and in how many pieces it works."""


def why(module: str, name: str) -> str:
    """Return the text of the error for a name that a module of Ray has, or could have, and the stand-in has not."""
    return f"{module} has no {name!r} here: {sentence(f'{module}.{name}')}"


def sentence(path: str) -> str:
    """Return what to do instead of using a name of Ray."""
    found = next((advice for advice, names in _ADVICE.items() if re.search(rf"(^|\.)({names})(\.|$)", path)), None)
    return found or MISSING.get(path.rpartition(".")[2], GENERAL)


def check_options(function: str, options: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments of a function of ``ray.data`` that would change the rows."""
    for name in options.keys() - _WITHOUT_EFFECT.split():
        if options[name]:
            advice = sentence(f"ray.data.Dataset.{function}.{name}")
            raise TypeError(f"{function}({name}=...) is not supported: {advice}")

"""What the stand-in for Ray lacks, each with a sentence on what to do instead. Runs in: anywhere.

Names that distrain itself lacks, too, are in :mod:`distrain.system.ray_names`.
"""

from __future__ import annotations

from distrain.system.ray_names import MISSING

_PRIVATE = "it is internal to Ray, and stays with Ray"
_SEARCH = (
    "schedulers and searchers are left to Optuna: write an objective that calls fit() and returns a metric, and give "
    "it to study.optimize()"
)

BELOW = {
    "ray.autoscaler": "there is no cluster to scale: the hosts are those of --hosts, --hostfile or the Slurm job",
    "ray.cluster_utils": "there is no cluster: hosts are those of --hosts, --hostfile or the Slurm job",
    "ray.dag": "there are no graphs of tasks: call the functions one after the other",
    "ray.data": (
        "read or compute the data with pandas, Polars, DuckDB, pyarrow or datasets, and pass it to ray.data.from_pandas(), "
        "from_arrow() or from_huggingface()"
    ),
    "ray.data.collate_fn": "pass a function that takes a dict of numpy arrays as iter_torch_batches(collate_fn=...)",
    "ray.data.preprocessors": (
        "use the transformations of scikit-learn or torchvision in map_batches(), or derive from ray.data.preprocessor."
        "Preprocessor"
    ),
    "ray.job_submission": "there is no cluster to submit to: run the script with `distrain run --as-ray`",
    "ray.rllib": "reinforcement learning is not a part of distrain: call the framework in train_func",
    "ray.serve": "serving is not a part of distrain: load the files of result.checkpoint.as_directory()",
    "ray.tune.schedulers": _SEARCH,
    "ray.tune.search": _SEARCH,
    "ray.workflow": "there are no workflows: call the functions one after the other",
}
"""Sentences for all names at and below a module of Ray."""

_GENERAL = "distrain's stand-in has no such name; docs/ray.md lists what it has, and without it, Ray itself is imported"


def why(module: str, name: str) -> str:
    """Return the text of the error for a name that a module of Ray has, or could have, and the stand-in has not."""
    return f"{module} has no {name!r} here: {_sentence(f'{module}.{name}')}"


def _sentence(path: str) -> str:
    words = path.split(".")
    above = (".".join(words[:count]) for count in range(len(words), 1, -1))
    found = next((BELOW[name] for name in above if name in BELOW), None)
    return found or MISSING.get(words[-1]) or (_PRIVATE if any(word.startswith("_") for word in words) else _GENERAL)

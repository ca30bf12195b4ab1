"""Names of Ray that distrain lacks, each with a sentence on what to do instead. Runs in: anywhere.

The sentence is in the AttributeError of ``distrain.Tuner``, in the ImportError of ``from distrain import Tuner`` or
``import distrain.tune``, and in the TypeError of ``RunConfig(stop=...)``.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from distrain.system.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

AS_RAY = "DISTRAIN_AS_RAY"
"""The variable that asks for the stand-in for Ray, distrain.as_ray."""


def is_asked_for_as_ray() -> bool:
    """Tell if the environment asks for the stand-in for Ray."""
    return os.environ.get(AS_RAY, "0") not in ("", "0")


# -- sentences -------------------------------------------------------------------------------------------------------

_AS_RAY = "`distrain run --as-ray` runs a script of Ray that has it, as it is"

_ADVICE = {
    "derive from distrain.UserCallback": "Callback TrainingCallback",
    "use DataParallelTrainer; distrain.lightgbm has a callback and get_network_params()": (
        "LightGBMConfig LightGBMTrainer"
    ),
    "use TorchTrainer, and make the library's own Trainer in train_func": "LightningConfigBuilder LightningTrainer",
    "hangs of any kind are a HangError; see FailureConfig.hang_timeout_s": "NCCLHangError",
    "distrain does not do inference: load the files of result.checkpoint.as_directory()": "Predictor",
    "use distrain.should_stop(), which becomes true on all ranks at the same call": (
        "PreemptionInfo get_preemption_info"
    ),
    "there is nothing to sync: workers write to RunConfig.storage_path themselves": "SyncConfig",
    "write 'train'": "TRAIN_DATASET_KEY",
    "TPUs are not supported": "TorchXLAConfig topology use_tpu xla",
    "it is called RunContext": "TrainRunContext",
    "a name of Ray 1: pass train_func to TorchTrainer or DataParallelTrainer, and call fit()": "Trainer",
    (
        "there is no Tune: loop over your settings and call fit() for each, for example in the objective of an Optuna "
        f"study; {_AS_RAY}"
    ): "ResultGrid TuneConfig TuneReportCallback Tuner tune",
    "any function will do for ValidationConfig(fn=...): leave the annotation out": "ValidationFn",
    "distrain itself replaces ray.train and ray.air: `import distrain as train`, `from distrain import session`": (
        "air train v2"
    ),
    "Horovod is not supported: use TorchTrainer or TensorflowTrainer": "horovod",
    (
        "there is no cluster to connect to: fit() starts the workers and ends them, so leave it out; " + _AS_RAY
    ): "init shutdown",
    "hosts have no labels here": "label_selector",
    "an argument of older versions of Ray: pass a train_func that calls train(), as in docs/migration/ray.md": (
        "dmatrix_params label_column num_boost_round params"
    ),
    "an old name of storage_path": "local_dir",
    "prepare the data in train_func": "preprocessor",
    f"there are no tasks, actors or objects: call the function itself, or use concurrent.futures; {_AS_RAY}": "remote",
    "distrain does not do reinforcement learning: call the framework in a train_func of DataParallelTrainer": "rllib",
    "use RunConfig(worker_runtime_env={'env_vars': {...}})": "runtime_env",
    "distrain does not serve models": "serve",
    "exit the loop in train_func instead": "stop",
}
_HOMES = """
    data.DataIterator data.Dataset jax.JaxConfig jax.JaxTrainer torch.TorchTrainer torch.prepare_data_loader
    torch.prepare_model xgboost.XGBoostConfig xgboost.XGBoostTrainer
"""
MISSING = {home.partition(".")[2]: f"it is distrain.{home}" for home in _HOMES.split()} | {
    name: advice for advice, names in _ADVICE.items() for name in names.split()
}
"""Names of Ray without a counterpart here, or in another module, and what to do instead."""

IGNORED = {
    "checkpoint_at_end": "report a checkpoint at the end of train_func",
    "checkpoint_frequency": "report a checkpoint in train_func whenever you want one",
    "controller_failure_limit": "the coordinator runs in this process",
    "elastic_resize_monitor_interval_s": "the number of workers changes only at restarts",
    "enable_shard_locality": "each worker reads its own rows",
    "execution_options": "workers read the data themselves; see prefetch_batches of iter_batches()",
    "fail_fast": "use max_failures=0",
    "init_method": "the rendezvous is by MASTER_ADDR and MASTER_PORT, which distrain sets",
    "log_to_file": "output is always kept, in logs/ of the run directory",
    "max_preemption_failures": "a run that was stopped continues when it is started again under its name",
    "placement_strategy": "hosts are filled in order, up to their slots",
    "preemption_grace_s": "see RunConfig.stop_grace_s",
    "ray_remote_kwargs": "the function is called in a process on the machine of fit()",
    "progress_reporter": "reports are shown as lines, and kept in metrics.jsonl",
    "relax_collectives_on_preemption": "see should_stop()",
    "sync_config": "there is nothing to sync: workers write to RunConfig.storage_path themselves",
    "trainer_resources": "the coordinator does not use a worker's slot",
    "verbose": "see LoggingConfig(log_level=...)",
}
"""Arguments of Ray without effect here, and what distrain does instead."""

_DEFAULTS = {
    "controller_failure_limit": -1,
    "elastic_resize_monitor_interval_s": 60.0,
    "enable_shard_locality": True,
    "init_method": "env",
    "max_preemption_failures": -1,
    "placement_strategy": "PACK",
}
"""Defaults of Ray that are truthy. They cause no warning."""

_POSITIONS = {
    "CheckpointConfig": "num_to_keep checkpoint_score_attribute checkpoint_score_order",
    "DataConfig": "datasets_to_split execution_options",
    "FailureConfig": "max_failures fail_fast",
    "RunConfig": """
        name storage_path storage_filesystem failure_config checkpoint_config sync_config verbose stop callbacks
        progress_reporter log_to_file""",
    "ScalingConfig": """
        trainer_resources num_workers use_gpu resources_per_worker placement_strategy accelerator_type""",
}
"""By class: its arguments in Ray's order. A number of workers may also come first."""

_SYNONYMS = {"config": "train_loop_config"}
"""Guessed names whose letters resemble another one."""
_arguments: dict[str, list[str]] = {}
"""By class: the arguments of its constructor."""


# -- names -----------------------------------------------------------------------------------------------------------


def explain(module: str, name: str) -> str:
    """Return the text of the AttributeError for a name that a module lacks."""
    return f"module {module!r} has no attribute {name!r}" + (f": {MISSING[name]}" if name in MISSING else "")


class _Finder:
    """The last finder of ``sys.meta_path``. It finds no module, but raises ImportError with the sentence."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        owner, _, name = fullname.rpartition(".")
        if owner.partition(".")[0] == "distrain" and name in MISSING:
            raise ModuleNotFoundError(f"{owner} has no {name!r}: {MISSING[name]}")


sys.meta_path.append(_Finder)


# -- arguments -------------------------------------------------------------------------------------------------------


_Class = TypeVar("_Class", bound=type)


def checks_arguments(cls: _Class) -> _Class:
    """Decorate a class whose constructor also takes keyword arguments of Ray.

    Those of a config may come by place, in Ray's order. A value other than Ray's default causes a warning for those of
    :data:`IGNORED`, and a TypeError for those of :data:`MISSING`, with the sentence. For a misspelt name, the TypeError
    suggests the right one; for an argument of another class, that class.
    """
    construct = cls.__init__  # type: ignore[misc]
    order = _POSITIONS.get(cls.__name__, "").split()
    import inspect  # at the top, a user's file of that name might be found instead

    known = [name for name in inspect.signature(construct).parameters if name != "self"]
    _arguments[cls.__name__] = known

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        skipped = 1 if args and order[:1] == ["trainer_resources"] and isinstance(args[0], (int, tuple)) else 0
        if twice := options.keys() & (by_place := dict(zip(order[skipped:], args, strict=False))):
            raise TypeError(f"{cls.__name__}() got multiple values for argument {min(twice)!r}")
        args, options = args[len(by_place) :], {**by_place, **options}
        for name in sorted(options.keys() - known):
            _refuse(cls.__name__, name, options.pop(name), known)
        construct(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _meant(name: str, known: Sequence[str]) -> str:
    """Return a suggestion for an unknown argument: one of the known ones, or the class that has it."""
    if (synonym := _SYNONYMS.get(name)) in known:
        return f"; did you mean {synonym}?"
    homes = (f"; did you mean {owner}({name}=...)?" for owner, names in _arguments.items() if name in names)
    return did_you_mean(name, known) or next(homes, "")


def _refuse(owner: str, name: str, value: Any, known: Sequence[str]) -> None:
    if name not in IGNORED and name not in MISSING:
        raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{_meant(name, known)}")
    if not value or value == _DEFAULTS.get(name):
        return
    if name in MISSING:
        raise TypeError(f"{owner}({name}=...): {MISSING[name]}")
    warnings.warn(f"{owner}({name}=...) has no effect: {IGNORED[name]}", UserWarning, stacklevel=3)

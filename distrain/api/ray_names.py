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
_CLUSTER = f"there is no cluster to connect to: fit() starts the workers and ends them, so leave it out; {_AS_RAY}"
_FRAMEWORK = "use DataParallelTrainer, and call the framework in train_func"
_INFERENCE = "distrain does not do inference: load the files of result.checkpoint.as_directory()"
_OF_RAY_1 = "a name of Ray 1: pass train_func to TorchTrainer or DataParallelTrainer, and call fit()"
_OUTER_LOOP = (
    "there is no Tune: loop over your settings and call fit() for each, for example in the objective of an Optuna "
    f"study; {_AS_RAY}"
)
_STOP = "use distrain.should_stop(), which becomes true on all ranks at the same call"
_TASKS = f"there are no tasks, actors or objects: call the function itself, or use concurrent.futures; {_AS_RAY}"
_TORCH = "use TorchTrainer, and make the library's own Trainer in train_func"
_TPU = "TPUs are not supported"
_TRAIN = "distrain itself replaces ray.train and ray.air: `import distrain as train`, `from distrain import session`"

MISSING = {
    **{name: f"it is distrain.torch.{name}" for name in ("TorchTrainer", "prepare_data_loader", "prepare_model")},
    "Callback": "derive from distrain.UserCallback",
    "DataIterator": "it is distrain.data.DataIterator",
    "Dataset": "it is distrain.data.Dataset",
    "JaxConfig": "it is distrain.jax.JaxConfig",
    "JaxTrainer": "it is distrain.jax.JaxTrainer",
    "LightGBMTrainer": _FRAMEWORK,
    "LightningConfigBuilder": _TORCH,
    "LightningTrainer": _TORCH,
    "NCCLHangError": "hangs of any kind are a HangError; see FailureConfig.hang_timeout_s",
    "Predictor": _INFERENCE,
    "PreemptionInfo": _STOP,
    "ResultGrid": _OUTER_LOOP,
    "SyncConfig": "there is nothing to sync: workers write to RunConfig.storage_path themselves",
    "TRAIN_DATASET_KEY": "write 'train'",
    "TorchXLAConfig": _TPU,
    "TrainRunContext": "it is called RunContext",
    "Trainer": _OF_RAY_1,
    "TrainingCallback": "derive from distrain.UserCallback",
    "TuneConfig": _OUTER_LOOP,
    "TuneReportCallback": _OUTER_LOOP,
    "Tuner": _OUTER_LOOP,
    "ValidationFn": "any function will do for ValidationConfig(fn=...): leave the annotation out",
    "XGBoostConfig": _FRAMEWORK,
    "XGBoostTrainer": _FRAMEWORK,
    "air": _TRAIN,
    "get_preemption_info": _STOP,
    "horovod": "Horovod is not supported: use TorchTrainer or TensorflowTrainer",
    "init": _CLUSTER,
    "label_selector": "hosts have no labels here",
    "lightgbm": _FRAMEWORK,
    "local_dir": "an old name of storage_path",
    "preprocessor": "prepare the data in train_func",
    "remote": _TASKS,
    "rllib": "distrain does not do reinforcement learning: " + _FRAMEWORK,
    "runtime_env": "use RunConfig(worker_runtime_env={'env_vars': {...}})",
    "serve": "distrain does not serve models",
    "shutdown": _CLUSTER,
    "stop": "exit the loop in train_func instead",
    "topology": _TPU,
    "train": _TRAIN,
    "tune": _OUTER_LOOP,
    "use_tpu": _TPU,
    "v2": _TRAIN,
    "xgboost": _FRAMEWORK,
    "xla": _TPU,
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

    A value other than Ray's default causes a warning for those of :data:`IGNORED`, and a TypeError for those of
    :data:`MISSING`, with the sentence. For a misspelt name, the TypeError suggests the right one; for an argument of
    another class, that class.
    """
    construct = cls.__init__  # type: ignore[misc]
    import inspect  # at the top, a user's file of that name might be found instead

    known = [name for name in inspect.signature(construct).parameters if name != "self"]
    _arguments[cls.__name__] = known

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for name in options.keys() - known:
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

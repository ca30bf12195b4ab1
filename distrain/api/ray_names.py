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
    "use DataParallelTrainer, and get_network_params() of distrain.lightgbm": "LightGBMConfig LightGBMTrainer",
    "use TorchTrainer, and make the library's own Trainer in train_func": "LightningConfigBuilder LightningTrainer",
    "hangs of any kind are a HangError; see FailureConfig.hang_timeout_s": "NCCLHangError",
    "distrain does not do inference: load the files of result.checkpoint.as_directory()": "Predictor",
    "use distrain.should_stop(), which all ranks see in the same call": "PreemptionInfo get_preemption_info",
    "there is nothing to sync: workers write to RunConfig.storage_path themselves": "SyncConfig",
    "write 'train'": "TRAIN_DATASET_KEY",
    "TPUs are not supported": "TorchXLAConfig topology use_tpu xla",
    "it is called RunContext": "TrainRunContext",
    "a name of Ray 1: pass train_func to TorchTrainer or DataParallelTrainer, and call fit()": "Trainer",
    "call fit() in a loop, or in a study of Optuna, see examples/optuna_sweep.py": "ResultGrid TuneConfig Tuner tune",
    "any function will do for ValidationConfig(fn=...): leave the annotation out": "ValidationFn",
    "write `import distrain as train`, or `from distrain import session`": "air train v2",
    "Horovod is not supported: use TorchTrainer or TensorflowTrainer": "horovod",
    f"leave it out: fit() starts the workers and ends them; {_AS_RAY}": "init shutdown",
    "hosts have no labels here": "label_selector",
    "pass a train_func, as in docs/migration/ray.md": "dmatrix_params label_column num_boost_round params",
    "an old name of storage_path": "local_dir",
    "prepare the data in train_func": "preprocessor",
    "there are no tasks, actors or objects: call the function itself, or use concurrent.futures": "remote",
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

_FIRST = {"FailureConfig": "max_failures", "RunConfig": "name", "ScalingConfig": "num_workers"}
"""By class: the argument that may come first, without its name."""
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

    Some configs take one without its name. A value that asks for something causes a warning for those of
    :data:`IGNORED`, and a TypeError for those of :data:`MISSING`, with the sentence. For a misspelt name, the TypeError
    suggests the right one; for an argument of another class, that class.
    """
    construct = cls.__init__  # type: ignore[misc]
    first = _FIRST.get(cls.__name__)
    import inspect  # at the top, a user's file of that name might be found instead

    known = [name for name in inspect.signature(construct).parameters if name != "self"]
    _arguments[cls.__name__] = known

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for name in sorted(options.keys() - known):
            _refuse(cls.__name__, name, options.pop(name), known)
        named = {first: args[0]} if first and args else {}
        construct(self, *args[len(named) :], **named, **options)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _refuse(owner: str, name: str, value: Any, known: Sequence[str]) -> None:
    if name not in IGNORED and name not in MISSING:
        homes = (f"; did you mean {other}({name}=...)?" for other, names in _arguments.items() if name in names)
        meant = did_you_mean(name, known) or next(homes, "")
        raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{meant}")
    if not value:
        return
    if name in MISSING:
        raise TypeError(f"{owner}({name}=...): {MISSING[name]}")
    warnings.warn(f"{owner}({name}=...) has no effect: {IGNORED[name]}", UserWarning, stacklevel=3)

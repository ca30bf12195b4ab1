"""What Ray Train has and distrain has not: a sentence for each name. Runs in: anywhere."""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["IGNORED", "MISSING", "did_you_mean", "explain", "without"]

_DATA = "Ray Data is not a part of distrain: make a DataLoader (or tf.data.Dataset) in train_func"

MISSING = {
    "DataConfig": _DATA,
    "NCCLHangError": "hangs of any kind are a HangError; see FailureConfig.hang_timeout_s",
    "PreemptionInfo": "use should_stop()",
    "SyncConfig": "there is nothing to sync: workers write into RunConfig.storage_path themselves",
    "TRAIN_DATASET_KEY": _DATA,
    "dataset_config": _DATA,
    "datasets": _DATA,
    "get_dataset_shard": _DATA,
    "get_preemption_info": "use should_stop()",
    "local_dir": "an old name of storage_path",
    "preprocessor": "prepare the data in train_func",
    "stop": "leave the loop of train_func instead",
    "use_tpu": "TPUs are not supported",
    "label_selector": "hosts have no labels here",
}
"""What cannot be done without."""

IGNORED = {
    "checkpoint_at_end": "report a checkpoint at the end of train_func",
    "checkpoint_frequency": "report a checkpoint whenever you want one",
    "controller_failure_limit": "the coordinator lives in this process",
    "elastic_resize_monitor_interval_s": "the number of workers changes at restarts only",
    "fail_fast": "say max_failures=0",
    "log_to_file": "output is always kept, in logs/ of the run directory",
    "max_preemption_failures": "a run that was stopped goes on when it is started again under its name",
    "preemption_grace_s": "see RunConfig.stop_grace_s",
    "ray_remote_kwargs": "the function is called in a process on the machine of fit()",
    "progress_reporter": "reports are shown as lines, and kept in metrics.jsonl",
    "relax_collectives_on_preemption": "see should_stop()",
    "sync_config": "there is nothing to sync: workers write into RunConfig.storage_path themselves",
}
"""What makes no difference, or what distrain does anyway."""


def explain(module: str, name: str) -> str:
    """The text of the AttributeError for a name that a module has not. One of Ray's is also warned about, since
    ``from module import name`` shows no such text."""
    text = f"module {module!r} has no attribute {name!r}"
    if name in MISSING:
        text += f": {MISSING[name]}"
        warnings.warn(text, UserWarning, stacklevel=3)
    return text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message about a misspelt word; empty if no known one is like it."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


_Class = TypeVar("_Class", bound=type)


def without(*names: str) -> Callable[[_Class], _Class]:
    """Class decorator: the constructor takes these keyword arguments of Ray's, too. Given a value, those of
    :data:`IGNORED` warn, and those of :data:`MISSING` raise TypeError, with the sentence. For a misspelt name, the
    TypeError suggests the right one."""

    def decorate(cls: _Class) -> _Class:
        construct = cls.__init__  # type: ignore[misc]
        known = [name for name in inspect.signature(construct).parameters if name != "self"]

        @functools.wraps(construct)
        def __init__(self: Any, *args: Any, **options: Any) -> None:
            _refuse(cls.__name__, {name: options.pop(name) for name in names if name in options})
            for name in (name for name in options if name not in known):
                raise TypeError(
                    f"{cls.__name__}() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}"
                )
            construct(self, *args, **options)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate


def _refuse(owner: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if value is None or value is False:
            continue
        if name in MISSING:
            raise TypeError(f"{owner}({name}=...): {MISSING[name]}")
        warnings.warn(f"{owner}({name}=...) has no effect: {IGNORED[name]}", UserWarning, stacklevel=3)

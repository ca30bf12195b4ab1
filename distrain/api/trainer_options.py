"""The arguments that all trainers take, written once. Runs in: coordinator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from distrain.api.config import DataConfig, RunConfig, ScalingConfig, ValidationConfig
from distrain.storage.checkpoint import Checkpoint
from distrain.system.arguments import check_type

_Constructor = TypeVar("_Constructor", bound="Callable[..., None]")


class TrainerOptions(TypedDict, total=False):
    """Keyword arguments of every trainer; see :class:`~distrain.DataParallelTrainer`."""

    train_loop_config: Mapping[str, Any] | None
    scaling_config: ScalingConfig | None
    run_config: RunConfig | None
    datasets: Mapping[str, Any] | None
    dataset_config: DataConfig | None
    resume_from_checkpoint: Checkpoint | str | Path | None
    metadata: Mapping[str, Any] | None
    validation_config: ValidationConfig | None


def check_options(options: TrainerOptions) -> None:
    """Raise TypeError for a value of another type. A path of a checkpoint must have become one."""
    for name, hint in get_type_hints(TrainerOptions).items():
        kind = get_args(hint)[0]
        check_type(name, options.get(name), get_origin(kind) or kind, optional=True)
    if getattr(options.get("run_config"), "stop", None):
        raise TypeError("RunConfig(stop=...) is not for trainers: exit the loop in train_func instead")


def showing_options(constructor: _Constructor) -> _Constructor:
    """Have ``help()`` show the keys of TrainerOptions in place of ``**options``."""
    own = inspect.signature(constructor)
    named = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind.__forward_arg__)
        for name, kind in TrainerOptions.__annotations__.items()
    ]
    constructor.__signature__ = own.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
    return constructor

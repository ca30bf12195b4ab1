"""The arguments of trainers: those that all take, written once, and the config of a framework. Runs in: coordinator."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from distrain.api.backend import BackendConfig
from distrain.api.config import DataConfig, RunConfig, ScalingConfig, ValidationConfig
from distrain.storage.checkpoint import Checkpoint
from distrain.system.arguments import check_type

_Constructor = TypeVar("_Constructor", bound="Callable[..., None]")
_Config = TypeVar("_Config", bound=BackendConfig)


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


def config_argument(
    kind: type[_Config], name: str, given: _Config | None, by_old_name: _Config | None = None
) -> _Config:
    """Return a trainer's argument ``{name}_config`` or ``{name}_backend``, its old name, or else the default.

    Must be called by a constructor of a class that :func:`~distrain.api.ray_names.checks_arguments` decorates, for the
    place that the DeprecationWarning names. Raises TypeError for a value of another type, or for both arguments.
    """
    new, old = f"{name}_config", f"{name}_backend"
    if by_old_name is not None:
        if given is not None:
            raise TypeError(f"{old} is the old name of {new}; give only {new}")
        warnings.warn(f"{old} is an old name; use {new}", DeprecationWarning, stacklevel=4)
        given = by_old_name
    check_type(new, given, kind, optional=True)
    return kind() if given is None else given

"""The options of the command line that are fields of the configs of a run. Runs in: coordinator.

A field has the option of its name: ``hang_timeout_s`` is ``--hang-timeout``. Its type, default and help come from the
config. The same table names the option in errors that are about a field.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import re
import types
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from distrain.api import config as configs
from distrain.api.config import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig, ShippingConfig
from distrain.hosts.cpu_topology import parse_list
from distrain.system.text import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Config = TypeVar("Config")

CONFIGS = (ScalingConfig, RunConfig, FailureConfig, CheckpointConfig, LoggingConfig, ShippingConfig)
BY_HAND = {
    "num_workers": "--num-workers",
    "trackers": "--tracker",
    "worker_runtime_env": "--env",
}
"""Fields whose options take something else than their values, see :mod:`distrain.cli.run.options`."""
NO_OPTION = (
    *("callbacks", "storage_filesystem"),  # objects of Python
    *("checkpoint_config", "failure_config", "logging_config", "shipping_config"),  # their fields have options
)
"""Fields that make no sense on a command line."""
PATH = "PATH"
"""The metavar of options that are paths."""
_NAMES = {
    "enabled": ("--no-ship",),
    "fetch_limit_bytes": ("--fetch-limit",),
    "host_wait_s": ("--hosts-wait",),
    "include": ("--ship",),
    "limit_bytes": ("--ship-limit",),
    "max_failures": ("--max-failures", "--max-restarts"),
    "ranks": ("--ranks-shown", "--local-ranks-filter"),
    "stop_grace_s": ("--stop-grace", "--shutdown-timeout"),
    "stop_signals": ("--signals-to-handle",),
}
"""The options of fields for which the rule does not give a good name."""


def _resources(text: str) -> dict[str, float]:
    try:
        return {name: float(amount) for name, _, amount in (part.partition("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be amounts such as CPU=4,memory=8e9, got {text!r}") from None


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", text, re.ASCII)
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a size such as 300MB or 2GB, got {text!r}")
    return int(float(match[1]) * 1000 ** " kMGT".index(match[2] or " "))


def parse_ranks(text: str) -> list[int]:
    """Return the ranks that an option such as ``0,2-5`` names."""
    with contextlib.suppress(ValueError):
        if found := parse_list(text):
            return sorted(found)
    raise argparse.ArgumentTypeError(f"{text!r}: must be ranks such as 0,2-5, the lower rank first")


_KEYWORDS: dict[str, dict[str, Any]] = {
    "checkpoint_ranks": {"type": lambda text: text if text == "all" else parse_ranks(text), "metavar": "0,2-5"},
    "enabled": {"help": "copy no code to other hosts: they have it at the same paths"},
    "hosts": {"metavar": "alpha:4,beta:4"},
    "include": {"type": str, "action": "append", "default": [], "metavar": PATH},
    "on_end": {"metavar": "COMMAND"},
    "ranks": {"type": parse_ranks, "metavar": "0,2-5"},
    "resources_per_worker": {"type": _resources, "metavar": "CPU=4,memory=8e9"},
    "ssh_args": {"metavar": "ARGS"},
    "stop_signals": {"type": lambda text: text.split(","), "metavar": "SIGTERM,SIGUSR1"},
    "transport": {"metavar": "HOW"},
}
"""Keywords for argparse that do not follow from a field."""


def fields_with_option(config: type) -> Iterator[Field[Any]]:
    """Yield the fields of a config that have an option that is made by the rule."""
    return (field for field in fields(config) if field.name not in BY_HAND and field.name not in NO_OPTION)


def names_of(field: str) -> tuple[str, ...]:
    """Return the names of the option for a field, the first of which errors use."""
    if field in BY_HAND:
        return (BY_HAND[field],)
    return _NAMES.get(field) or (f"--{field.removesuffix('_s').replace('_', '-')}",)


def named_options() -> dict[str, str]:
    """Return the option of each field, such as ``--hosts-wait`` for ``FailureConfig.host_wait_s``."""
    every = ((config, field.name) for config in CONFIGS for field in fields(config))
    return {f"{config.__name__}.{name}": names_of(name)[0] for config, name in every if name not in NO_OPTION}


def add_options_of(config: type, add: Callable[..., object]) -> None:
    """Add the options of a config with a method ``add_argument``. Raises TypeError for a field of an unknown type."""
    kinds, about = configs.types_of(config), _descriptions(config)
    for field in fields_with_option(config):
        keywords = _keywords(field, kinds[field.name], about.get(field.name, "")) | _KEYWORDS.get(field.name, {})
        add(*names_of(field.name), dest=field.name, **keywords)


def config_from(config: type[Config], options: argparse.Namespace, **others: Any) -> Config:
    """Make a config of the options that :func:`add_options_of` has added. Raises TypeError or ValueError."""
    return config(**{field.name: getattr(options, field.name) for field in fields_with_option(config)}, **others)


def _keywords(field: Field[Any], kinds: Sequence[Any], about: str) -> dict[str, Any]:
    """Return the keywords for argparse that follow from a field."""
    default = None if field.default is MISSING else field.default
    if isinstance(default, bool):
        return {"action": "store_false" if default else "store_true", "default": default, "help": about}
    is_size = field.name.endswith("_bytes")
    shown = f"{default:g}" if isinstance(default, float) else size(default or 0) if is_size else default
    keywords = {"default": default, "help": f"{about} (default: {shown})" if shown not in (None, ()) else about}
    if get_origin(kinds[0]) is Literal:
        return keywords | {"choices": get_args(kinds[0])}
    if kinds[0] not in (int, float, str) and field.name not in _KEYWORDS:
        raise TypeError(f"{field.name}: no rule for options of type {kinds[0]}; add it to one of the tables above")
    kind, metavar = kinds[0], {float: "SECONDS", int: "N"}.get(kinds[0], "NAME")
    if os.PathLike in {get_origin(one) for one in kinds}:
        metavar = PATH
    if is_size:
        kind, metavar = _size, "SIZE"
    if kind is not str and kinds[-1] is types.NoneType:
        kind = _or_none(kind)
    return keywords | {"type": kind, "metavar": metavar}


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    parse.__name__ = kind.__name__  # argparse names it
    return parse


def _descriptions(config: type) -> dict[str, str]:
    """Return the first sentence about each field in the docstring of a config."""
    entries = re.findall(r"^(\w+): (.*(?:\n    .*)*)", inspect.cleandoc(config.__doc__ or ""), re.MULTILINE)
    texts = ((name, re.sub(r"\s+", " ", re.sub(r":\w+:(?=`)|`", "", text))) for name, text in entries)
    return {name: re.split(r"\.(?: |$)", text)[0].replace("%", "%%") for name, text in texts}

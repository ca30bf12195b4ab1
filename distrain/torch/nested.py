"""Tensors in nested containers. Runs in: worker."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of ``value`` with ``change(leaf)`` instead of every leaf.

    It descends into dicts and other mappings, lists, tuples, named tuples and instances of dataclasses, and keeps their
    classes. Leaves are tensors, objects with a ``to()``, and everything else.
    """
    if isinstance(value, torch.Tensor) or callable(getattr(value, "to", None)):
        return change(value)
    if isinstance(value, (list, MutableMapping)):
        clone = copy.copy(value)  # its constructor may take other arguments, like that of defaultdict
        for place, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            clone[place] = map_leaves(item, change)
        return clone
    if isinstance(value, Mapping):
        return type(value)({key: map_leaves(item, change) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple):
        changed = (map_leaves(item, change) for item in value)
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, change)
    return change(value)


def _dataclass(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy field by field, without ``__init__``, which may take other arguments; also a frozen dataclass."""
    clone = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(clone, field.name, map_leaves(getattr(value, field.name), change))
    return clone

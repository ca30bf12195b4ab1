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
    if isinstance(value, Mapping):
        return _mapping(value, change)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return _sequence(value, change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, change)
    return change(value)


def _mapping(value: Mapping[Any, Any], change: Callable[[Any], Any]) -> Any:
    changed = {key: map_leaves(item, change) for key, item in value.items()}
    if type(value) is dict:
        return changed
    if isinstance(value, MutableMapping):  # its constructor may take other arguments, like that of defaultdict
        clone: MutableMapping[Any, Any] = copy.copy(value)
        for key, item in changed.items():
            clone[key] = item
        return clone
    return type(value)(changed)  # type: ignore[call-arg]


def _sequence(value: list[Any] | tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    changed = [map_leaves(item, change) for item in value]
    if type(value) is list:
        return changed
    if isinstance(value, list):
        clone = copy.copy(value)
        clone[:] = changed
        return clone
    return type(value)(changed)


def _dataclass(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy field by field, without ``__init__``, which may take other arguments; also a frozen dataclass."""
    clone = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(clone, field.name, map_leaves(getattr(value, field.name), change))
    return clone

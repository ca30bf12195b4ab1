"""Tensors within whatever holds them. Runs in: worker."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

__all__ = ["map_leaves"]


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change(leaf)`` in the place of every leaf; ``value`` itself stays as it is.

    Dicts and other mappings, lists, tuples, named tuples and instances of dataclasses are looked through and keep their
    class. Leaves are tensors, objects that move themselves (``.to()``), and everything else.
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
    if isinstance(value, MutableMapping):  # whose constructor may want something else: defaultdict
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
    """Field by field, frozen or not, without its ``__init__``, which may want other arguments."""
    clone = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(clone, field.name, map_leaves(getattr(value, field.name), change))
    return clone

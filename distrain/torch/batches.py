"""Batches of a dataset as torch's tensors, on the worker's device. Runs in: worker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from distrain.api import current
from distrain.data.blocks import Block, converted, object_types, to_arrays
from distrain.errors import DataError
from distrain.torch.device import get_device, map_leaves, on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np


def converter(
    dtypes: Any, collate_fn: Callable[[Any], Any] | None, *, pin_memory: bool = False
) -> Callable[[Block], Any]:
    """Return the function that makes a batch of tensors of a block. Raises ValueError for dtypes with a collate_fn."""
    if collate_fn is not None and dtypes is not None:
        raise ValueError("iter_torch_batches(): give either dtypes or collate_fn, which chooses the types itself")
    make = partial(_tensors, dtypes=dtypes) if collate_fn is None else partial(_collated, collate_fn=collate_fn)
    if pin_memory and torch.cuda.is_available():
        return lambda block: map_leaves(make(block), lambda leaf: leaf.pin_memory() if torch.is_tensor(leaf) else leaf)
    return make


def mover(device: Any) -> Callable[[Iterator[tuple[Any, int]]], Iterator[tuple[Any, int]]]:
    """Return the function that moves batches to a device; ``"auto"``: the worker's own, or the CPU outside of one."""
    if device == "auto":
        device = get_device() if current.session else "cpu"
    return partial(on_device, device=torch.device(device))


class _Batches(IterableDataset[Any]):
    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def loader(batches: Iterable[Any]) -> DataLoader[Any]:
    """Return a DataLoader that passes batches on, for libraries that take nothing else. Each loop is one over them."""
    return DataLoader(_Batches(batches), batch_size=None)


def _is_object(block: Block) -> bool:
    """Return whether the rows are no dicts, such as the pairs of an image and a label."""
    return isinstance(block, list) and bool(block) and not isinstance(block[0], dict)


def _collated(block: Block, collate_fn: Callable[[Any], Any]) -> Any:
    return collate_fn(block if _is_object(block) else to_arrays(block))


def _tensors(block: Block, dtypes: Any) -> Any:
    if _is_object(block):
        try:
            batch = default_collate(block)
        except (TypeError, RuntimeError) as error:
            raise DataError(f"rows such as {block[0]!r:.50} cannot be joined: {error}; give a collate_fn") from error
        return map_leaves(batch, lambda leaf: leaf.to(dtypes) if dtypes and torch.is_tensor(leaf) else leaf)
    return converted(block, dtypes, _tensor)


def _tensor(name: str, column: np.ndarray[Any, Any], dtype: torch.dtype | None) -> torch.Tensor:
    try:
        if not column.flags.writeable:  # torch would warn of memory that is Arrow's
            column = column.copy()
        return torch.as_tensor(column, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"column {name!r} ({column.dtype}) cannot become a tensor: {_cause(column) or error}; leave it out with "
            "columns=, convert it with map_batches(), or give a collate_fn"
        ) from error


def _cause(column: np.ndarray[Any, Any]) -> str | None:
    """Return why a column of objects has no type of its own."""
    if column.dtype != object:
        return None
    kinds = object_types(column)
    return "its arrays have different shapes" if kinds == "ndarray" else f"it has values of type {kinds}"

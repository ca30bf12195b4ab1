"""The devices of this worker, the way of batches to them, and functions of the tensors in batches. Runs in: worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from distrain.session import get_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def get_devices() -> list[torch.device]:
    """Return the devices of this worker: its GPUs, or the CPU. Raises RuntimeError outside of a worker.

    ::

        ids = [device.index for device in get_devices()]
    """
    return [torch.device("cuda", index) for index in get_context().devices] or [torch.device("cpu")]


def get_device() -> torch.device:
    """Return the (first) device of this worker. Raises RuntimeError outside of a worker.

    ::

        inputs = inputs.to(get_device())
    """
    return get_devices()[0]


# -- batches ---------------------------------------------------------------------------------------------------------


def on_device(batches: Iterator[Any], device: torch.device, *, ahead: bool = True) -> Iterator[Any]:
    """Yield each batch on a device. With ``ahead``, the next batch is copied to a GPU while the caller computes."""
    if ahead and device.type == "cuda":
        return _copied_ahead(batches, device)
    return batches if device.type == "cpu" else (moved(batch, device) for batch in batches)


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield each batch on the GPU. A separate stream copies the next batch while the caller computes."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ended = object()

    def start() -> Any:
        batch = next(batches, ended)
        with torch.cuda.stream(stream):
            return map_leaves(batch, lambda leaf: leaf.to(device, non_blocking=True) if torch.is_tensor(leaf) else leaf)

    def finish(batch: Any) -> Any:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        return map_leaves(batch, lambda leaf: _arrived(leaf, device, current))

    ahead = start()
    while ahead is not ended:
        batch = finish(ahead)
        ahead = start()
        yield batch


def _arrived(leaf: Any, device: torch.device, current: torch.cuda.Stream) -> Any:
    """Return a leaf for use on the current stream.

    Objects with a ``to()`` of their own move here, because memory that they allocate on the other stream could be
    reused too early.
    """
    if not torch.is_tensor(leaf):
        return moved(leaf, device)
    leaf.record_stream(current)
    return leaf


def moved(batch: Any, device: torch.device) -> Any:
    """Return the batch with everything that has a ``to()`` on the device."""
    return map_leaves(batch, lambda leaf: leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of ``value`` with ``change(leaf)`` instead of every leaf.

    It descends into the containers that torch knows: dicts, lists, tuples, named tuples, and classes that were
    registered with ``torch.utils._pytree``. Leaves are tensors, objects with a ``to()``, and everything else.
    """
    return tree_map(change, value, is_leaf=lambda one: callable(getattr(one, "to", None)))

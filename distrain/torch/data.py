"""prepare_data_loader: each worker's share of the data, on its device. Runs in: worker."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from distrain.torch.device import get_device
from distrain.torch.nested import map_leaves
from distrain.torch.reproducibility import loader_generator, order_seed
from distrain.torch.sampler import shared, shares_already
from distrain.worker.session import session_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrain.context import TrainContext

__all__ = ["prepare_data_loader"]


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> DataLoader[Any]:
    """Give every worker its share of the data, and move batches to its device.

    add_dist_sampler: divide the data among the workers; False: the loader already gives each worker its share.
    move_to_device: move the batches to :func:`get_device`.
    auto_transfer: on a GPU, copy the next batch while the current one is processed. This takes the memory of one more
        batch, and works best with ``pin_memory=True``. False: copy each batch when it is requested.

    ::

        loader = prepare_data_loader(DataLoader(dataset, batch_size=32, shuffle=True))
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            for inputs, labels in loader:
                ...

    The result is a copy of the loader, of its class and with all its options. ``batch_size`` is per worker.
    ``set_epoch`` works with any number of workers, but not for an IterableDataset. With more than one worker, the data
    is divided by its sampler:

    - A plain order, shuffled or not, becomes a DistributedSampler. Ranks get equally many samples; some samples come
      twice if the number does not divide evenly. Without ``set_epoch`` the order changes after each complete pass, and
      all ranks must make equally many passes.
    - With a sampler of your own (WeightedRandomSampler, RandomSampler with replacement, ...), all ranks draw the same
      order, seeded by the epoch, and each takes every n-th sample of it; see
      :class:`~distrain.torch.sampler.ShareSampler`. Every rank must construct the sampler with the same arguments.
    - A ``batch_sampler`` of your own is divided in the same way, by whole batches. Of a plain ``BatchSampler``, its
      sampler is divided instead.
    - Nothing is divided if the sampler already knows its rank, like a DistributedSampler, or if the data is an
      IterableDataset.

    Batches may be tensors; dicts, lists, tuples, named tuples and dataclasses of tensors; and objects with a ``to()``.

    A subclass of DataLoader keeps its class and attributes. A subclass that derives something from its sampler in the
    constructor keeps using that sampler, and must divide the data itself.

    Raises TypeError for anything but a DataLoader, ValueError for a sampler without a length, which cannot be divided,
    RuntimeError outside of a worker.
    """
    context = session_of("torch.prepare_data_loader").context
    if not isinstance(data_loader, DataLoader):
        raise TypeError(f"prepare_data_loader takes a torch DataLoader, got {type(data_loader).__name__}")
    changes: dict[str, Any] = {}
    if add_dist_sampler and not isinstance(data_loader.dataset, IterableDataset):
        changes |= _samplers(data_loader, context)
    if data_loader.generator is None and (generator := loader_generator()):
        changes["generator"] = generator
    loader = _changed(data_loader, changes) if changes else data_loader
    device = get_device()
    if move_to_device and device.type != "cpu":
        return _on_device(loader, device, auto_transfer)
    return loader


def _samplers(loader: DataLoader[Any], context: TrainContext) -> dict[str, Any]:
    """Return the attributes of the loader that give this rank its share; none if it has its share already."""
    batched = loader.batch_sampler is not None
    order = loader.batch_sampler if batched else loader.sampler
    if shares_already(order):
        return {}
    order = shared(order, context.world_size, context.world_rank, order_seed())
    sampler = order.sampler if type(order) is BatchSampler else order
    return {"sampler": sampler, "batch_sampler": order if batched else None}


def _changed(loader: DataLoader[Any], changes: dict[str, Any]) -> DataLoader[Any]:
    """Copy the loader and change attributes. Its class is not called, as subclasses have constructors of their own."""
    clone = copy.copy(loader)
    vars(clone).update(changes, _iterator=None)  # the original keeps the iterator of its persistent workers
    return clone


# -- to the device -----------------------------------------------------------------------------------------------------


def _on_device(loader: DataLoader[Any], device: torch.device, auto_transfer: bool) -> DataLoader[Any]:
    """Return a copy of the loader that moves its batches to a device. Its class is a subclass of the loader's."""
    clone = _changed(loader, {"_device": device, "_auto_transfer": auto_transfer})
    kind = type(loader)
    if not issubclass(kind, _DeviceLoader):
        clone.__class__ = type(kind.__name__, (_DeviceLoader, kind), {"__module__": kind.__module__})
    return clone


class _DeviceLoader(DataLoader[Any]):
    """A mixin that precedes a loader's own class, and moves its batches to a device."""

    _device: torch.device
    _auto_transfer: bool

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches: Iterator[Any] = super().__iter__()
        if self._auto_transfer:
            return on_device(batches, self._device)
        return (_moved(batch, self._device) for batch in batches)


def on_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield each batch on a device. The next batch is copied to a GPU while the caller computes."""
    if device.type == "cuda":
        return _copied_ahead(batches, device)
    return batches if device.type == "cpu" else (_moved(batch, device) for batch in batches)


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield each batch on the GPU. A separate stream copies the next batch while the caller computes."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ended = object()

    def start() -> Any:
        batch = next(batches, ended)
        with torch.cuda.stream(stream):
            return map_leaves(batch, lambda leaf: leaf.to(device, non_blocking=True) if _is_tensor(leaf) else leaf)

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
    if not _is_tensor(leaf):
        return _moved(leaf, device)
    leaf.record_stream(current)
    return leaf


def _moved(batch: Any, device: torch.device) -> Any:
    return map_leaves(batch, lambda leaf: leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)

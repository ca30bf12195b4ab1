"""prepare_data_loader: each worker's share of the data, on its device, resumed where it was. Runs in: worker.

gather_for_metrics joins what the ranks have computed of their shares.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import distributed
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from distrain.torch.device import get_device, on_device
from distrain.torch.progress import Progress, SamplerProgress, counted, progress_of
from distrain.torch.reproducibility import loader_generator, order_seed
from distrain.torch.sampler import is_distributed, is_plain, shared
from distrain.worker.session import Session, session_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrain.api.context import TrainContext

T = TypeVar("T")


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
    *,
    resume: bool = True,
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

    resume: store the position in every checkpoint, and continue there when the run resumes; see below.

    The result is a copy of the loader, of its class and with all its options. ``batch_size`` is per worker. The data is
    divided by its sampler:

    - A plain order, shuffled or not, is divided as by a DistributedSampler. Ranks get equally many samples; some
      samples come twice if the number does not divide evenly. The order follows from the seed and the epoch, with any
      number of workers. The seed is that of the loader's or sampler's generator, else of ``torch.manual_seed()``, on
      rank 0; a resumed run keeps it. ``set_epoch`` chooses the epoch. Without it, each complete pass is an epoch, and
      all ranks must make equally many passes.
    - With a sampler of your own (WeightedRandomSampler, RandomSampler with replacement, ...), all ranks draw the same
      order, seeded by the epoch, and each takes every n-th sample of it; see
      :class:`~distrain.torch.sampler.ShareSampler`. Every rank must construct the sampler with the same arguments.
    - A ``batch_sampler`` of your own is divided in the same way, by whole batches. Of a plain ``BatchSampler``, its
      sampler is divided instead.
    - Nothing is divided if the sampler already knows its rank, like a DistributedSampler, or if the data is an
      IterableDataset.

    Every checkpoint that is reported stores the epoch, and the samples that all workers have taken from the loader. A
    resumed run continues with the next sample of that epoch, with any number of workers and of loader processes;
    rank 0 says so. Batches that were loaded ahead of time do not count. If the checkpoint was reported in the loop
    after the last batch, the first pass is empty, so that loops over epochs stay in step. Loaders are matched in the
    order in which they are prepared.

    There is no position for an IterableDataset, a sampler that knows its rank (other than a DistributedSampler), a
    sampler without a length, and ``in_order=False``. But a loader that has ``state_dict()``, like torchdata's
    StatefulDataLoader, is asked for its state, which needs the same number of workers. If it has a position, its own
    ``load_state_dict()`` is refused, because it would skip the same rows again.

    Batches may be tensors; dicts, lists, tuples and named tuples of tensors; and objects with a ``to()``. What is in
    objects of other classes is not moved.

    A subclass of DataLoader keeps its class and attributes. A subclass that derives something from its sampler in the
    constructor keeps using that sampler, and must divide the data itself.

    Raises TypeError for anything but a DataLoader, ValueError for a sampler without a length, which cannot be divided,
    DataError if the checkpoint has a position of another dataset or order, RuntimeError outside of a worker.
    """
    session = session_of("torch.prepare_data_loader")
    if not isinstance(data_loader, DataLoader):
        raise TypeError(f"prepare_data_loader takes a torch DataLoader, got {type(data_loader).__name__}")
    clone = copy.copy(data_loader)
    changes = _samplers(data_loader, session.context, divide=add_dist_sampler)
    if data_loader.generator is None and (generator := loader_generator()):
        changes["generator"] = generator
    device = get_device() if move_to_device else torch.device("cpu")
    vars(clone).update(changes, _iterator=None)  # the original keeps the iterator of its persistent workers
    progress = progress_of(clone, session, resume=resume)
    vars(clone).update(_device=device, _auto_transfer=auto_transfer, _progress=progress, _session=session)
    if resume and isinstance(progress, SamplerProgress) and hasattr(clone, "load_state_dict"):
        vars(clone)["load_state_dict"] = _refuse_state
    kind = type(clone)
    if not issubclass(kind, _PreparedLoader):
        clone.__class__ = type(kind.__name__, (_PreparedLoader, kind), {"__module__": kind.__module__})
    return clone


def _refuse_state(state: object) -> NoReturn:
    """Refuse the loader's own state, from which it would skip rows that the sampler has skipped already."""
    raise RuntimeError(
        "load_state_dict() of a prepared loader: it continues by itself where the checkpoint was; leave the call out, "
        "or pass prepare_data_loader(resume=False) to keep its state yourself"
    )


def _samplers(loader: DataLoader[Any], context: TrainContext, *, divide: bool) -> dict[str, Any]:
    """Return the attributes of the loader that give this rank its share; none if it has its share already."""
    batched = loader.batch_sampler is not None
    order = loader.batch_sampler if batched else loader.sampler
    if isinstance(loader.dataset, IterableDataset) or not (divide or is_distributed(order)):
        return {}
    own = order
    order = shared(order, context.world_size, context.world_rank, lambda: order_seed(loader, context))
    if order is own:
        return {}
    sampler = order.sampler if is_plain(order, "BatchSampler") else order
    return {"sampler": sampler, "batch_sampler": order if batched else None}


class _PreparedLoader(DataLoader[Any]):
    """A mixin that precedes a loader's own class. It moves the batches to a device, and counts them."""

    _device: torch.device
    _auto_transfer: bool
    _progress: Progress
    _session: Session

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        loop = self._progress.begin()
        batches = on_device(super().__iter__(), self._device, ahead=self._auto_transfer)
        return counted(batches, self._progress, loop, self._session)


# -- the results of all ranks ------------------------------------------------------------------------------------------


def gather_for_metrics(values: T) -> T:
    """Return the rows of all ranks, each row of the data once, for metrics such as accuracy.

    values: what this rank has computed of the newest batch of a prepared loader: a tensor with one row for each of the
        batch, or such tensors in dicts, lists and tuples. All ranks call it for each batch.

    A prepared loader gives each rank a share, and repeats rows if the data does not divide evenly. The result, which is
    the same on all ranks, is without these, and in the order of the data, or of the loader's sampler. If the loader
    doesn't divide the data itself (IterableDataset, a sampler that knows its rank), the rows of rank 0 come first, and
    rows that ranks have in common come more than once.

    ::

        loader = prepare_data_loader(DataLoader(dataset, batch_size=32))
        right = rows = 0
        for inputs, labels in loader:
            predicted, labels = gather_for_metrics((model(inputs).argmax(1), labels))
            right, rows = right + (predicted == labels).sum().item(), rows + len(labels)
        distrain.report({"accuracy": right / rows})

    Raises ValueError outside of a loop over a prepared loader, for values that are not tensors with a row for each of
    the batch, for rows of different shapes, and with ``in_order=False``, where it is not known which rows are repeated.
    """
    session = session_of("torch.gather_for_metrics")
    leaves, structure = tree_flatten(values)
    places = _places(session, leaves)
    if session.context.world_size == 1:
        return values
    everyone: list[Any] = [None] * distributed.get_world_size()
    own = [leaf.detach().cpu().clone() for leaf in leaves]  # a view would take all of its tensor along
    distributed.all_gather_object(everyone, (places, own))
    found = sorted((place, row) for row, place in enumerate(place for of_rank, _ in everyone for place in of_rank))
    index = torch.tensor([row for place, row in found if place >= 0], dtype=torch.long)
    try:
        joined = [torch.cat(parts)[index] for parts in zip(*(of_rank for _, of_rank in everyone), strict=True)]
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"gather_for_metrics(): ranks have rows of different shapes, pad them: {error}") from error
    rows = [tensor.to(leaf.device) for tensor, leaf in zip(joined, leaves, strict=True)]
    return tree_unflatten(rows, structure)  # type: ignore[no-any-return]


def _places(session: Session, leaves: list[Any]) -> list[int]:
    """Return the places of the rows in the order of the data. Raises ValueError."""
    sizes = {len(leaf) if isinstance(leaf, torch.Tensor) and leaf.dim() else -1 for leaf in leaves}
    loaders = [one for one in session.loaders if one.loop and one.loop.batches and not one.loop.is_ended]
    for loader in sorted(loaders, key=lambda one: -one.loop.newest):  # the loop of a batch may have an inner one
        places: list[int] | None = loader.places(max(sizes, default=-1))
        if places is not None and len(sizes) == 1 and -1 not in sizes:
            return places
    raise ValueError(
        "gather_for_metrics() is called for each batch of a loop over the result of prepare_data_loader() (without "
        "in_order=False), with tensors that have a row for each of its rows, such as losses with reduction='none'; got "
        f"{[getattr(leaf, 'shape', type(leaf).__name__) for leaf in leaves]}"
    )

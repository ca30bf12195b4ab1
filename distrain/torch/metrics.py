"""gather_for_metrics: what all ranks have computed of a batch, each row once. Runs in: worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

from distrain.torch.device import get_device
from distrain.torch.nested import map_leaves
from distrain.worker.session import session_of

if TYPE_CHECKING:
    from distrain.worker.session import Session

T = TypeVar("T")


def gather_for_metrics(values: T) -> T:
    """Return the rows of all ranks, each row of the data once, for metrics such as accuracy.

    values: what this rank has computed of the newest batch of a prepared loader: a tensor with one row for each of the
        batch, or such tensors in dicts, lists, tuples and dataclasses. All ranks call it for each batch.

    A prepared loader gives each rank a share, and repeats rows if the data does not divide evenly. The result, which is
    the same on all ranks, is without these, and in the order of the data, or of the loader's sampler. If the loader
    doesn't divide the data itself (IterableDataset, a sampler that knows its rank), the rows of rank 0 come first, and
    rows that ranks have in common come more than once.

    ::

        loader = prepare_data_loader(DataLoader(validation_set, batch_size=32))
        right = rows = 0
        for inputs, labels in loader:
            predicted, labels = gather_for_metrics((model(inputs).argmax(1), labels))
            right, rows = right + (predicted == labels).sum().item(), rows + len(labels)
        distrain.report({"accuracy": right / rows})

    Raises ValueError outside of a loop over a prepared loader, for values that are not tensors with a row for each of
    the batch, for rows of different shapes or types, and with ``in_order=False``, where it is not known which rows are
    repeated.
    """
    session = session_of("torch.gather_for_metrics")
    leaves: list[Any] = []
    map_leaves(values, leaves.append)
    places = _places(session, leaves)
    if session.context.world_size == 1:
        return values
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, (places, tuple((leaf.dtype, leaf.shape[1:]) for leaf in leaves)))
    if len(kinds := {of_rank for _, of_rank in everyone}) > 1:
        raise ValueError(f"gather_for_metrics(): ranks have rows of different types or shapes, {kinds}; pad them")
    longest = max(len(of_rank) for of_rank, _ in everyone)
    found = [(place, rank * longest + i) for rank, (own, _) in enumerate(everyone) for i, place in enumerate(own)]
    index = torch.tensor([number for place, number in sorted(found) if place >= 0], dtype=torch.long)

    def gathered(leaf: torch.Tensor) -> torch.Tensor:
        padded = leaf.new_zeros((longest, *leaf.shape[1:]), device=get_device())
        padded[: len(leaf)] = leaf.detach()
        own = padded.flatten().view(torch.uint8)  # gloo cannot gather every type
        parts = [torch.empty_like(own) for _ in everyone]
        distributed.all_gather(parts, own)
        rows = torch.cat(parts).view(leaf.dtype).view(-1, *leaf.shape[1:])
        return rows[index.to(rows.device)].to(leaf.device)

    return map_leaves(values, gathered)  # type: ignore[no-any-return]


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

"""Samplers that give each rank its share of an order that is the same on all ranks. Runs in: worker.

A sampler does not know how far train_func has got, as loader workers fetch batches ahead. The loader does
(:mod:`distrain.torch.progress`), and tells the sampler when an epoch is complete.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler

_MODULES_OF_LOADERS = ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler")
"""The modules whose samplers DataLoader and StatefulDataLoader make themselves."""

_RANK_ATTRIBUTES = ("num_replicas", "num_processes", "num_shards", "world_size", "_world_size")
"""Attributes of samplers that give each rank a share (those of timm, detectron2, accelerate, ...) and are no
DistributedSampler."""


def shared(sampler: Any, world_size: int, rank: int, seed: Callable[[], int] = lambda: 0) -> Any:
    """Return a sampler that gives this rank its share of another sampler, and has ``set_epoch()``.

    For a plain order, shuffled or not, that is a :class:`ResumableSampler`. A DistributedSampler is wrapped in an
    :class:`OwnSampler`. A plain BatchSampler becomes one over a shared sampler, with the same batch size. A sampler
    that already gives each rank a share is returned as it is. Any other sampler is wrapped in a :class:`ShareSampler`,
    unless it has no length and there is one worker. ``seed()`` is called if the order needs one, and must return the
    same on all ranks.

    Raises ValueError for a sampler without a length, which cannot be divided evenly.
    """
    if is_plain(sampler, "BatchSampler"):
        inner = shared(sampler.sampler, world_size, rank, seed)
        return sampler if inner is sampler.sampler else BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    if type(sampler) is DistributedSampler:
        return OwnSampler(sampler)
    if _shares_already(sampler):
        return sampler
    if _is_loaders_own(sampler):
        options = {"shuffle": True, "seed": seed()} if is_plain(sampler, "RandomSampler") else {"shuffle": False}
        return ResumableSampler(sampler.data_source, num_replicas=world_size, rank=rank, **options)
    if isinstance(sampler, Sized):
        return ShareSampler(sampler, world_size, rank, seed())
    if world_size == 1:
        return sampler
    raise ValueError(
        f"prepare_data_loader: the loader's sampler ({type(sampler).__name__}) has no len(), so it cannot be divided "
        "evenly; give each rank its share yourself, and pass add_dist_sampler=False"
    )


def is_distributed(sampler: Any) -> bool:
    """Tell if the sampler, or the one in a plain batch sampler, is a DistributedSampler of torch's own class."""
    return type(sampler.sampler if is_plain(sampler, "BatchSampler") else sampler) is DistributedSampler


def is_plain(sampler: Any, kind: str) -> bool:
    """Tell if the class of a sampler is one that loaders use by themselves, with this name, and not a subclass."""
    return type(sampler).__name__ == kind and type(sampler).__module__ in _MODULES_OF_LOADERS


def _shares_already(sampler: Any) -> bool:
    """Tell if the sampler, or the one in a batch sampler, already gives each rank a share."""
    inner = getattr(sampler, "sampler", None)
    return any(
        isinstance(candidate, DistributedSampler) or any(hasattr(candidate, name) for name in _RANK_ATTRIBUTES)
        for candidate in (sampler, inner)
        if candidate is not None
    )


def _is_loaders_own(sampler: Any) -> bool:
    """Tell if the sampler is one that a loader makes from ``shuffle=``."""
    if is_plain(sampler, "RandomSampler"):
        return not sampler.replacement and len(sampler) == len(sampler.data_source)
    return is_plain(sampler, "SequentialSampler")


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler that can begin an epoch at any row of its order.

    The order of an epoch does not depend on the number of ranks. What is left of it from a row on is divided among the
    ranks in the same way as a whole order: rank r gets the rows r, r + n, r + 2n, ... If the number does not divide
    evenly, the first rows of the order come again (with ``drop_last``, the last ones are left out). ``len()`` is always
    that of a whole epoch.
    """

    _resumed: tuple[int, int] = (0, 0)
    """An epoch, and the row at which its passes begin."""
    _since = 0
    """From this epoch on up to that one, passes have no rows: a rollback has left them out."""
    _drawn: int | None = None
    """The length of the last order. A sampler of the user's may have another length in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        order, first = self.order(), self.first_row
        if not first:
            self._resumed = (0, 0)
        self._drawn = len(order)
        size = self.share_of(max(0, len(order) - first)) * self.num_replicas
        return islice(cycle(order), first + self.rank, first + size, self.num_replicas)

    def __len__(self) -> int:
        return self.share_of(len(self.dataset))  # type: ignore[arg-type]

    def order(self) -> list[Any]:
        """Return the whole order of this epoch, which is the same on all ranks."""
        whole: DistributedSampler[Any] = DistributedSampler(
            self.dataset, num_replicas=1, rank=0, shuffle=self.shuffle, seed=self.seed
        )
        whole.set_epoch(self.epoch)
        return list(whole)

    @property
    def kind(self) -> str:
        """The kind of the order, in words."""
        return "shuffled" if self.shuffle else "not shuffled"

    @property
    def rows(self) -> int:
        """The number of rows in the order."""
        return len(self.dataset) if self._drawn is None else self._drawn  # type: ignore[arg-type]

    def share_of(self, rows: int) -> int:
        """Return how many of so many rows a rank gets."""
        return rows // self.num_replicas if self.drop_last else math.ceil(rows / self.num_replicas)

    # -- where an epoch begins --------------------------------------------------------------------------------------

    @property
    def first_row(self) -> int:
        """The row at which a pass of this epoch begins."""
        return self.first_row_of(self.epoch)

    def first_row_of(self, epoch: int) -> int:
        """Return the row at which a pass of an epoch begins."""
        if self.resumes_after(epoch):
            return self.rows
        return self._resumed[1] if epoch == self._resumed[0] else 0

    def resumes_after(self, epoch: int) -> tuple[int, int] | None:
        """Return the later epoch and the row at which the rows begin again, if a rollback has left out this epoch."""
        return self._resumed if self._since <= epoch < self._resumed[0] else None

    def resume(self, epoch: int, row: int, since: int) -> None:
        """Go to the epoch ``since``. Passes have no rows up to ``epoch``, and begin at this row there.

        That holds until one of that epoch is complete, or another epoch is drawn.
        """
        self.set_epoch(since)
        self._resumed, self._since = (epoch, row), since

    def complete(self, epoch: int) -> None:
        """Count a complete pass: go to the next epoch, unless ``set_epoch()`` has chosen another one already."""
        if not self.resumes_after(epoch):
            self._resumed = (0, 0)
        if self.epoch == epoch:
            self.set_epoch(epoch + 1)


class OwnSampler(ResumableSampler):
    """A DistributedSampler of the user's, which keeps the epoch: its ``set_epoch()`` works, and the one here."""

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        vars(self).update(vars(sampler))
        self.sampler = sampler

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch of the user's sampler."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch next."""
        self.sampler.set_epoch(epoch)


class ShareSampler(ResumableSampler):
    """Every n-th sample of another sampler.

    Each rank has an equal copy of the sampler. To make all copies give the same order, this class seeds their sources
    of random numbers with ``seed`` plus the epoch: torch, numpy and Python, and generators that are attributes of the
    sampler. It restores them afterwards. A sampler whose order depends on anything else that differs among the ranks
    must divide its samples itself.
    """

    def __init__(self, sampler: Any, world_size: int, rank: int, seed: int = 0) -> None:
        super().__init__(sampler, num_replicas=world_size, rank=rank, shuffle=False, seed=seed)
        self.sampler = sampler

    def order(self) -> list[Any]:
        """Return the order that the other sampler draws with the random numbers of this epoch."""
        with _seeded(self.seed + self.epoch, self.sampler):
            return list(self.sampler)

    @property
    def kind(self) -> str:
        """The class of the other sampler."""
        return type(self.sampler).__name__

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # copy asks an object that has no attributes yet
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch next. A sampler with a ``set_epoch()`` of its own gets the call, too."""
        super().set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


# -- the same random numbers on every rank -----------------------------------------------------------------------------


@contextlib.contextmanager
def _seeded(seed: int, sampler: Any) -> Iterator[None]:
    """Seed every source of random numbers that the sampler may use, and restore them afterwards."""
    inner = getattr(sampler, "sampler", None)
    attributes = [value for own in (sampler, inner) for value in getattr(own, "__dict__", {}).values()]
    numpy: Any = sys.modules.get("numpy")
    everywhere = [torch.default_generator, random, *([numpy.random] if numpy else [])]
    with contextlib.ExitStack() as stack:
        for source in (*everywhere, *attributes):
            _seed_until_exit(source, seed, numpy, stack)
        yield


def _seed_until_exit(source: Any, seed: int, numpy: Any, stack: contextlib.ExitStack) -> None:
    """Seed a source of random numbers, of any kind, until the stack exits. Ignore other objects."""
    if isinstance(source, torch.Generator):
        stack.callback(source.set_state, source.get_state())
        source.manual_seed(seed)
    elif isinstance(source, random.Random) or source is random:
        stack.callback(source.setstate, source.getstate())
        source.seed(seed)
    elif numpy and (isinstance(source, numpy.random.RandomState) or source is numpy.random):
        stack.callback(source.set_state, source.get_state())
        source.seed(seed % 2**32)
    elif numpy and isinstance(source, numpy.random.Generator):
        bits = source.bit_generator
        stack.callback(setattr, bits, "state", bits.state)
        bits.state = type(bits)(seed).state

"""Samplers that give each rank its share of an order that is the same on all ranks. Runs in: worker."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

__all__ = ["CountingSampler", "ShareSampler", "WholeSampler", "shared", "shares_already"]

_RANK_ATTRIBUTES = ("num_replicas", "num_processes", "num_shards", "world_size", "_world_size")
"""Attributes of samplers that give each rank a share (those of timm, detectron2, accelerate, ...) and are no
DistributedSampler."""


def shares_already(sampler: Any) -> bool:
    """Tell if the sampler, or the one in a batch sampler, already gives each rank a share."""
    inner = getattr(sampler, "sampler", None)
    return any(
        isinstance(candidate, DistributedSampler) or any(hasattr(candidate, name) for name in _RANK_ATTRIBUTES)
        for candidate in (sampler, inner)
        if candidate is not None
    )


def shared(sampler: Any, world_size: int, rank: int, seed: int = 0) -> Any:
    """Return a sampler that gives this rank its share of another sampler, and has ``set_epoch()``.

    For a plain order, shuffled or not, that is a :class:`CountingSampler`. A plain BatchSampler becomes one over a
    shared sampler, with the same batch size. Any other sampler is wrapped in a :class:`ShareSampler`. With one worker
    the order is ``sampler``'s own. The seed must be the same on all ranks.

    Raises ValueError for a sampler without a length, which cannot be divided evenly.
    """
    if type(sampler) is BatchSampler:
        inner = shared(sampler.sampler, world_size, rank, seed)
        return BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    if world_size == 1:
        return sampler if hasattr(sampler, "set_epoch") else WholeSampler(sampler)
    if _is_plain(sampler):
        shuffle = isinstance(sampler, RandomSampler)
        return CountingSampler(sampler.data_source, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed)
    if not isinstance(sampler, Sized):
        raise ValueError(
            f"prepare_data_loader: the loader's sampler ({type(sampler).__name__}) has no len(), so it cannot be "
            "divided evenly; give each rank its share yourself, and pass add_dist_sampler=False"
        )
    return ShareSampler(sampler, world_size, rank, seed)


def _is_plain(sampler: Any) -> bool:
    """Tell if the sampler is one that DataLoader makes from ``shuffle=``."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and len(sampler) == len(sampler.data_source)
    return type(sampler) is SequentialSampler


class WholeSampler(Sampler[Any]):
    """All of another sampler, with a ``set_epoch()``, so that scripts work the same with any number of workers."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return _attribute_of_inner(self, name)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the sampler of a single worker draws another order for every epoch by itself."""


class CountingSampler(DistributedSampler[Any]):
    """A DistributedSampler that counts the epochs by itself, at the end of each complete pass.

    A script that forgets ``set_epoch()`` still gets a new order for each epoch. If only some ranks make a complete
    pass, they disagree on the epoch, and must call ``set_epoch()``.
    """

    def __iter__(self) -> Iterator[Any]:
        yield from self._share()
        self.set_epoch(self.epoch + 1)

    def _share(self) -> Iterable[Any]:
        return super().__iter__()


class ShareSampler(CountingSampler):
    """Every n-th sample of another sampler.

    If the number does not divide evenly, some samples from the beginning come again at the end, as in
    DistributedSampler.

    Each rank has an equal copy of the sampler. To make all copies give the same order, this class seeds their sources
    of random numbers with ``seed`` plus the epoch: torch, numpy and Python, and generators that are attributes of the
    sampler. It restores them afterwards. A sampler whose order depends on anything else that differs among the ranks
    must divide its samples itself.
    """

    def __init__(self, sampler: Any, world_size: int, rank: int, seed: int = 0) -> None:
        super().__init__(sampler, num_replicas=world_size, rank=rank, shuffle=False, seed=seed)
        self.sampler = sampler

    def _share(self) -> Iterable[Any]:
        with _seeded(self.seed + self.epoch, self.sampler):
            order = list(self.sampler)
        size = self._samples_per_rank(len(order)) * self.num_replicas
        order = (order * math.ceil(size / max(1, len(order))))[:size]
        return order[self.rank :: self.num_replicas]

    def __len__(self) -> int:
        return self._samples_per_rank(len(self.sampler))

    def _samples_per_rank(self, length: int) -> int:
        """Return the number of samples of each rank. A sampler may have another length in each epoch."""
        return math.ceil(length / self.num_replicas)

    def __getattr__(self, name: str) -> Any:
        return _attribute_of_inner(self, name)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch next. A sampler with a ``set_epoch()`` of its own gets the call, too."""
        super().set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


def _attribute_of_inner(outer: Any, name: str) -> Any:
    if name == "sampler":  # copy asks an object that has no attributes yet
        raise AttributeError(name)
    return getattr(outer.sampler, name)


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

"""Samplers that give each rank its share of an order on which all ranks agree. Runs in: worker."""

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

_TELL_TALES = ("num_replicas", "num_processes", "num_shards", "world_size", "_world_size")
"""Attributes of samplers that know of ranks (those of timm, detectron2, accelerate, ...) without being a
DistributedSampler."""


def shares_already(sampler: Any) -> bool:
    """Whether the sampler, or the one within a batch sampler, gives each rank a share of its own."""
    inner = getattr(sampler, "sampler", None)
    return any(
        isinstance(candidate, DistributedSampler) or any(hasattr(candidate, name) for name in _TELL_TALES)
        for candidate in (sampler, inner)
        if candidate is not None
    )


def shared(sampler: Any, world_size: int, rank: int, seed: int = 0) -> Any:
    """A sampler that gives this rank its share of what ``sampler`` gives, and has ``set_epoch()``.

    A :class:`CountingSampler` if all that was said about the order is whether it is shuffled; a plain BatchSampler over
    a shared sampler, with the batch size unchanged; otherwise a :class:`ShareSampler`, of batches if the sampler makes
    batches. With one worker the order is ``sampler``'s own. The seed must be the same on all ranks.

    Raises ValueError for a sampler without a length, which cannot be shared out evenly.
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
            f"prepare_data_loader: the loader's sampler ({type(sampler).__name__}) has no len(), so that it cannot be "
            "shared out evenly; give each rank its share yourself, and pass add_dist_sampler=False"
        )
    return ShareSampler(sampler, world_size, rank, seed)


def _is_plain(sampler: Any) -> bool:
    """Whether ``shuffle=`` is all that was said about the order."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and len(sampler) == len(sampler.data_source)
    return type(sampler) is SequentialSampler


class WholeSampler(Sampler[Any]):
    """All of another sampler, with a ``set_epoch()``, so that a script need not ask how many workers there are."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return _attribute_of_inner(self, name)

    def set_epoch(self, epoch: int) -> None:
        """Nothing: one worker draws another order for every epoch without being told."""


class CountingSampler(DistributedSampler[Any]):
    """A DistributedSampler that goes on to the next epoch by itself, at the end of each complete pass, so that a
    forgotten ``set_epoch()`` does not mean the same order for ever. Where only some ranks make a complete pass, they
    get out of step, and have to call it.
    """

    def __iter__(self) -> Iterator[Any]:
        yield from self._share()
        self.set_epoch(self.epoch + 1)

    def _share(self) -> Iterable[Any]:
        return super().__iter__()


class ShareSampler(CountingSampler):
    """Every n-th of what another sampler gives. As in DistributedSampler, some from the beginning come again at the end
    if it does not come out even.

    Each rank has a copy of the sampler, made alike; that all copies give the same order is brought about by seeding
    what they draw from: the random state of torch, numpy and Python, and generators that are attributes of the sampler.
    All are as before afterwards. They start from ``seed`` plus the epoch. A sampler whose order depends on anything
    else that differs among the ranks has to do its own sharing.
    """

    def __init__(self, sampler: Any, world_size: int, rank: int, seed: int = 0) -> None:
        super().__init__(sampler, num_replicas=world_size, rank=rank, shuffle=False, seed=seed)
        self.sampler = sampler

    def _share(self) -> Iterable[Any]:
        with _seeded(self.seed + self.epoch, self.sampler):
            order = list(self.sampler)
        size = self._rounds(len(order)) * self.num_replicas
        order = (order * math.ceil(size / max(1, len(order))))[:size]
        return order[self.rank :: self.num_replicas]

    def __len__(self) -> int:
        return self._rounds(len(self.sampler))

    def _rounds(self, length: int) -> int:
        """How many each rank gets. A sampler may have another length in each epoch."""
        return math.ceil(length / self.num_replicas)

    def __getattr__(self, name: str) -> Any:
        return _attribute_of_inner(self, name)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch next; the sampler itself is told as well, if it wants to know."""
        super().set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


def _attribute_of_inner(outer: Any, name: str) -> Any:
    if name == "sampler":  # not there yet: copy asks for attributes of an empty object
        raise AttributeError(name)
    return getattr(outer.sampler, name)


# -- the same random numbers on every rank -----------------------------------------------------------------------------


@contextlib.contextmanager
def _seeded(seed: int, sampler: Any) -> Iterator[None]:
    """Everything that the sampler may draw from starts from ``seed``, and goes on as before afterwards."""
    inner = getattr(sampler, "sampler", None)
    attributes = [value for own in (sampler, inner) for value in getattr(own, "__dict__", {}).values()]
    numpy: Any = sys.modules.get("numpy")
    everywhere = [torch.default_generator, random, *([numpy.random] if numpy else [])]
    with contextlib.ExitStack() as stack:
        for source in (*everywhere, *attributes):
            _seed_for_a_while(source, seed, numpy, stack)
        yield


def _seed_for_a_while(source: Any, seed: int, numpy: Any, stack: contextlib.ExitStack) -> None:
    """Seed a generator of random numbers, of any kind, until the stack unwinds; leave other things alone."""
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

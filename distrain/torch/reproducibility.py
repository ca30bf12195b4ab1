"""enable_reproducibility: the same random numbers in every run. Runs in: worker."""

from __future__ import annotations

import os
import pickle
import random
import sys
import zlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from distrain.worker.session import Session, session_of

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from distrain.api.context import TrainContext

_UNSEEDED = torch.Generator().initial_seed()
_SEEDS: WeakKeyDictionary[Session, int] = WeakKeyDictionary()


def enable_reproducibility(seed: int = 0) -> None:
    """Seed the random numbers of Python, numpy and torch, and make torch use deterministic algorithms.

    Call it at the top of train_func. Every rank gets the same seed. ::

        enable_reproducibility(seed=42)

    Data loaders that pass :func:`prepare_data_loader` afterwards are shuffled by this seed. Their workers draw the same
    numbers in every run, and different numbers in each worker of each rank. A loader's own ``generator`` and
    ``worker_init_fn`` are kept.

    torch raises RuntimeError for operations without a deterministic algorithm. Its notes on reproducibility list what
    still makes runs differ. Raises RuntimeError outside of a worker.
    """
    _SEEDS[session_of("torch.enable_reproducibility")] = seed
    seed_random_numbers(seed)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def seed_random_numbers(seed: int) -> None:
    """Seed the random numbers of Python, torch, and numpy if it is installed."""
    random.seed(seed)
    torch.manual_seed(seed)
    if find_spec("numpy"):
        import numpy

        numpy.random.seed(seed % 2**32)


def order_seed(loader: DataLoader[Any], context: TrainContext) -> int:
    """Return the seed of a loader's order: that of its sampler's generator, its own or torch's; 0 if none is seeded.

    All ranks get rank 0's, as they may be seeded differently. Without a process group, only generators of torch count:
    others are mostly not seeded.
    """
    is_whole = context.world_size == 1
    has_group = not is_whole and distributed.is_available() and distributed.is_initialized()
    holders = (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler)
    own = [holder for holder in holders if not type(holder).__module__.startswith("torchdata")]  # those make generators
    values = [value for holder in (*own, loader) for value in getattr(holder, "__dict__", {}).values()]
    seeds = (_seed_of(value, only_torch=not is_whole and not has_group) for value in values)
    found = next((seed for seed in seeds if seed is not None), torch.initial_seed())
    seed = 0 if found == _UNSEEDED else found % 2**63
    if not has_group:
        return seed
    store = distributed.distributed_c10d._get_default_store()
    key = f"distrain/order/{store.add(f'distrain/orders/{context.world_rank}', 1)}"
    if context.world_rank == 0:
        store.set(key, str(seed))
    return int(store.get(key))


def _seed_of(value: Any, *, only_torch: bool) -> int | None:
    """Return a number that follows from a generator's seed; None for other objects."""
    if isinstance(value, torch.Generator):
        return value.initial_seed()
    numpy: Any = None if only_torch else sys.modules.get("numpy")
    kinds = (random.Random, numpy.random.RandomState, numpy.random.Generator) if numpy else ()
    return zlib.crc32(pickle.dumps(value)) if isinstance(value, kinds) else None


def loader_generator() -> torch.Generator | None:
    """Return the generator of the seeds of a loader's workers; None unless runs must be reproducible."""
    session = session_of("torch.prepare_data_loader")
    if session not in _SEEDS:
        return None
    return torch.Generator().manual_seed(_SEEDS[session] + session.context.world_rank)

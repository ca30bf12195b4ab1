"""enable_reproducibility: the same random numbers in every run. Runs in: worker."""

from __future__ import annotations

import os
import random
from importlib.util import find_spec
from weakref import WeakKeyDictionary

import torch

from distrain.worker.session import Session, session_of

__all__ = ["enable_reproducibility", "loader_generator", "order_seed"]

_SEEDS: WeakKeyDictionary[Session, int] = WeakKeyDictionary()


def enable_reproducibility(seed: int = 0) -> None:
    """Seed Python's, numpy's and torch's random numbers, the same on every rank, and have torch choose deterministic
    algorithms. Call it at the top of train_func.

    Data loaders that pass :func:`prepare_data_loader` afterwards are shuffled by this seed, and their workers draw the
    same numbers in every run, other ones in each worker of each rank. A loader's own ``generator`` and
    ``worker_init_fn`` are kept.

    torch raises RuntimeError for operations that have no deterministic algorithm, and what still makes runs differ is
    in its notes on reproducibility. Raises RuntimeError outside of a worker.
    """
    _SEEDS[session_of("torch.enable_reproducibility")] = seed
    random.seed(seed)
    torch.manual_seed(seed)
    if find_spec("numpy"):
        import numpy

        numpy.random.seed(seed % 2**32)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def order_seed() -> int:
    """What shuffled orders start from, the same on all ranks; 0, as in a DistributedSampler, if nobody chose it."""
    return _SEEDS.get(session_of("torch.prepare_data_loader"), 0)


def loader_generator() -> torch.Generator | None:
    """What a data loader of this worker is to draw its workers' seeds from; None if that does not matter."""
    session = session_of("torch.prepare_data_loader")
    if session not in _SEEDS:
        return None
    return torch.Generator().manual_seed(_SEEDS[session] + session.context.world_rank)

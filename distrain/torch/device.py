"""Which device is this worker's, and who of a host goes first. Runs in: worker."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from distrain.session import get_context
from distrain.worker.session import Session, session_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["get_device", "get_devices", "local_rank_zero_first"]


def get_devices() -> list[torch.device]:
    """The devices of this worker: its GPUs, or the CPU. Raises RuntimeError outside of a worker."""
    return [torch.device("cuda", index) for index in get_context().devices] or [torch.device("cpu")]


def get_device() -> torch.device:
    """The (first) device of this worker. Raises RuntimeError outside of a worker."""
    return get_devices()[0]


# -- one rank of a host before the others ------------------------------------------------------------------------------

_POLL_S = 0.05

_CALLS: WeakKeyDictionary[Session, Iterator[int]] = WeakKeyDictionary()
"""Numbers the calls of each session: all ranks of a host make them in the same order."""


@contextlib.contextmanager
def local_rank_zero_first() -> Iterator[None]:
    """For downloads: local rank 0 runs the body, then the other ranks of its host do, and find the files there.

    ::

        with local_rank_zero_first():
            data = CIFAR10("data", download=True)

    Ranks of other hosts are not waited for, and no collective is used, so that a download may take longer than a
    collective may. Every rank of the host has to come here equally often.

    Raises RuntimeError outside of a worker; on several ranks of a host without a process group; and, on the other
    ranks, if local rank 0 has left the body by an exception.
    """
    session = session_of("torch.local_rank_zero_first")
    context = session.context
    number = next(_CALLS.setdefault(session, itertools.count()))
    if context.local_world_size == 1:
        yield
        return
    store = _store()
    key = f"distrain/local_rank_zero_first/{context.node_rank}/{number}"
    if context.local_rank == 0:
        with _told(store, key, context.world_rank):
            yield
        return
    if failure := _awaited(store, key):
        raise RuntimeError(f"local_rank_zero_first(): {failure}")
    yield


@contextlib.contextmanager
def _told(store: Any, key: str, rank: int) -> Iterator[None]:
    """Tell the others how the body ended, whichever way it does."""
    try:
        yield
    except BaseException as error:
        store.set(key, f"rank {rank}, which goes first on this host, failed: {error!r:.500}")
        raise
    store.set(key, "")


def _awaited(store: Any, key: str) -> str:
    """How the body of local rank 0 ended: empty if well.

    Polled: the store's own wait() holds back signal handlers, and prints a warning for every time-out.
    Raises torch's DistNetworkError (a RuntimeError) if rank 0, which keeps the store, is gone.
    """
    while not store.check([key]):
        time.sleep(_POLL_S)
    text: str = store.get(key).decode()
    return text


def _store() -> Any:
    if not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError(
            "local_rank_zero_first() needs a process group to learn when local rank 0 is done; call "
            "torch.distributed.init_process_group() before it"
        )
    return distributed.distributed_c10d._get_default_store()

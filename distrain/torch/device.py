"""The device of this worker, and code that one rank of a host runs before the others. Runs in: worker."""

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


# -- one rank of a host before the others ------------------------------------------------------------------------------

_POLL_S = 0.05

_CALLS: WeakKeyDictionary[Session, Iterator[int]] = WeakKeyDictionary()
"""Numbers of the calls of each session. All ranks of a host make the calls in the same order."""


@contextlib.contextmanager
def local_rank_zero_first() -> Iterator[None]:
    """Let local rank 0 run the body before the other ranks of its host, which then find its downloads there.

    ::

        with local_rank_zero_first():
            data = download("data")

    It does not wait for ranks of other hosts, and uses no collective, so a download may take longer than the timeout of
    collectives. Every rank of the host must call it equally often.

    Raises RuntimeError outside of a worker; on several ranks of a host without a process group; and, on the other
    ranks, if the body has raised an exception on local rank 0.
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
        with _announcing_end(store, key, context.world_rank):
            yield
        return
    if failure := _await_first_rank(store, key):
        raise RuntimeError(f"local_rank_zero_first(): {failure}")
    yield


@contextlib.contextmanager
def _announcing_end(store: Any, key: str, rank: int) -> Iterator[None]:
    """Write to the store how the body ended: empty text, or the error."""
    try:
        yield
    except BaseException as error:
        store.set(key, f"rank {rank}, which runs it first on this host, failed: {error!r:.500}")
        raise
    store.set(key, "")


def _await_first_rank(store: Any, key: str) -> str:
    """Return the error of local rank 0's body; empty if there was none.

    It polls, because the store's own wait() delays signal handlers, and prints a warning for every timeout. Raises
    torch's DistNetworkError (a RuntimeError) if rank 0, which serves the store, is gone.
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

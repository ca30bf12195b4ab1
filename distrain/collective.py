"""Collectives that need no process group: barrier(), broadcast_from_rank_zero(). Runs in: worker.

They go through the coordinator: use them for control flow (milliseconds, small data), and not for tensors.
"""

from __future__ import annotations

import pickle
from typing import TypeVar

from distrain.session import get_context
from distrain.system.pickling import pickled
from distrain.worker.session import session_of

__all__ = ["barrier", "broadcast_from_rank_zero"]

_LARGEST = 16 << 20
"""Bytes of pickled data that broadcast_from_rank_zero() accepts."""
T = TypeVar("T")


def barrier() -> None:
    """Wait until every rank has called it.

    The n-th collective of a rank pairs with the n-th of every other rank. Raises CollectiveError, which names the
    ranks, if a rank has finished train_func or has called another collective instead; RuntimeError outside of a worker.

    ::

        if distrain.get_context().get_world_rank() == 0:
            download("data")
        distrain.collective.barrier()
    """
    session_of("collective.barrier").collective("barrier()", b"")


def broadcast_from_rank_zero(data: T) -> T:
    """Return rank 0's ``data`` on every rank; the ``data`` of other ranks is ignored.

    data: an object that can be pickled, 16 MiB at most; use ``torch.distributed`` for tensors.

    Raises ValueError if it is larger, and otherwise the errors of :func:`barrier`.

    ::

        settings = distrain.collective.broadcast_from_rank_zero({"seed": 42})
    """
    session = session_of("collective.broadcast_from_rank_zero")
    body = b""
    if get_context().get_world_rank() == 0:
        body = pickled(data)
        if len(body) > _LARGEST:
            raise ValueError(
                f"broadcast_from_rank_zero(): the data is {len(body):,} bytes when pickled, at most "
                f"{_LARGEST:,} are allowed; use torch.distributed.broadcast_object_list(), or a file"
            )
    received: T = pickle.loads(session.collective("broadcast_from_rank_zero()", body))  # noqa: S301 - rank 0 of our own run
    return received

"""``ray.tune.get_context()``, which also answers outside of a trial, as Ray's does. Runs in: anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain import session
from distrain.api.context import TrainContext

if TYPE_CHECKING:
    from collections.abc import Callable

_ALONE = {"get_local_world_size": 1, "get_world_size": 1} | dict.fromkeys(
    ("get_local_rank", "get_node_rank", "get_world_rank"), 0
)


class OutsideOfTrial:
    """The context where no trial is: one rank, and no names."""

    def __getattr__(self, name: str) -> Callable[[], Any]:
        getattr(TrainContext, name)  # raises AttributeError for a name that no context has
        return lambda: _ALONE.get(name)


def get_context() -> TrainContext | OutsideOfTrial:
    """Return the context of the trial."""
    try:
        return session.get_context()
    except RuntimeError:  # outside of a worker
        return OutsideOfTrial()

"""``ray.train.get_preemption_info()``, which is :func:`distrain.should_stop`. Runs in: worker."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from distrain.session import get_context, should_stop


@dataclass(frozen=True)
class PreemptionInfo:
    """The ranks that will be stopped: all of them, because a run stops as a whole. It is not known when."""

    deadline_ms: int | None
    preempted_node_to_ranks: dict[str, list[int]]

    @property
    def preempted_node_ids(self) -> list[str]:
        """The names of the hosts that will be stopped."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """The ranks that will be stopped."""
        return sorted(rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks)


def get_preemption_info() -> PreemptionInfo | None:
    """Return None until the run should stop, at the same call on all ranks. All count as ranks of this host."""
    if not should_stop():
        return None
    return PreemptionInfo(None, {platform.node(): list(range(get_context().get_world_size()))})

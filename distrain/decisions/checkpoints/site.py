"""The facts beside the ranks on which decisions about checkpoints depend. Runs in: coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distrain.hosts.world import WorldPlan
from distrain.storage.names import checkpoint_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from distrain import wire
    from distrain.api.config import CheckpointConfig
    from distrain.system.remote_path import RemotePath


@dataclass(eq=False)
class Site:
    """The facts about a run and its hosts on which the life of its checkpoints depends.

    location: the run directory. is_remote: uploaders store all files. racks: by host. validates: the run has a
    validation function. metadata: the run's, which is added to that of every checkpoint.
    checkpoint: where the run starts if it has no checkpoint itself.
    plan: that of the latest attempt. lacks_storage: tells whether a host does not see the storage.
    is_training: tells whether hosts have all that they need for uploads. is_idle: tells whether the storage has
    nothing to do. new_name: returns a name for the checkpoint with a number, and never the same one again.
    wall_time: returns the seconds since 1970. token: what hosts show each other to get checkpoints in memory.
    """

    config: CheckpointConfig
    location: Path | RemotePath
    is_remote: bool
    plan: WorldPlan = field(default_factory=lambda: WorldPlan(ranks=()))
    checkpoint: str | None = None
    racks: Mapping[str, str] = field(default_factory=dict)
    validates: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    lacks_storage: Callable[[str], bool] = lambda host: False
    is_training: Callable[[], bool] = lambda: True
    is_idle: Callable[[], bool] = lambda: True
    new_name: Callable[[int], str] = checkpoint_name
    wall_time: Callable[[], float] = lambda: 0.0
    token: str = ""

    def host_of(self, rank: int) -> str:
        """Return the host of a rank."""
        return self.plan.ranks[rank].host

    def needs_uploader(self, report: wire.Reported) -> bool:
        """Return whether an uploader or a mover stores the files of a report, and not the worker itself."""
        return not report.waits or self.is_remote or self.lacks_storage(self.host_of(report.rank))

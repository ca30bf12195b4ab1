"""The growth of a run that trains with fewer workers than it may have. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from distrain.decisions.blame import culprit_first
from distrain.decisions.placement import make_plan
from distrain.errors import ResourcesError
from distrain.system.text import name_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.api.config import ScalingConfig
    from distrain.decisions.run.host_pool import HostPool
    from distrain.errors import RankFailure
    from distrain.hosts.world import WorldPlan

FIRST_INTERVAL_S = 15.0
"""Seconds until missing hosts are tried again. They double with every try."""
LONGEST_INTERVAL_S = 60.0
FIRST_PATIENCE_S = 60.0
"""Seconds for which a run does not grow after its growth has failed. They double until one succeeds."""


class Growth:
    """The attempts that were ended at a checkpoint because hosts had come that they lacked.

    While too few workers train, missing hosts are tried again. Those that an attempt has for the first time are on
    trial until it commits a checkpoint.
    """

    def __init__(self, scaling: ScalingConfig, pool: HostPool) -> None:
        self.due = math.inf
        """When to try missing hosts again; infinity if none are missing, or the run does not grow."""
        self._scaling, self._pool = scaling, pool
        self._ended: int | None = None
        """The latest attempt that was ended."""
        self._workers = 0
        """The number of its workers."""
        self._new: Sequence[str] = ()
        """The hosts that it lacked, until they have proved themselves, or have failed."""
        self._interval_s = FIRST_INTERVAL_S
        self._patience_s = FIRST_PATIENCE_S
        self._not_before = -math.inf

    def reason(self, attempt: int) -> str:
        """Return why this attempt was ended, if it was."""
        back = "is back" if len(self._new) == 1 else "are back"
        return f"{name_hosts(self._new)} {back}" if attempt == self._ended else ""

    def describe(self, attempt: int, workers: int, start: str) -> str:
        """Say where the run continues after this attempt, and with how many workers; "" if it was not ended to grow."""
        if attempt != self._ended:
            return ""
        if workers <= self._workers:
            return f"{name_hosts(self._new)} is gone again: continuing from {start}"
        return f"{self.reason(attempt)}: continuing from {start} with {workers} workers instead of {self._workers}"

    def on_trial(self, attempt: int) -> Sequence[str]:
        """Return the new hosts of this attempt, if it has not committed a checkpoint yet."""
        return self._new if self._ended == attempt - 1 else ()

    def is_undone(self, attempt: int, failures: Sequence[RankFailure]) -> bool:
        """Return whether this attempt has failed because a new host was lost."""
        culprit = culprit_first(failures)[0] if failures else None
        return culprit is not None and culprit.lost and culprit.host in self.on_trial(attempt)

    def begin(self, workers: int, now: float) -> None:
        """Note that so many workers train. If there are no more than before the growth, it has failed."""
        if self._new and workers <= self._workers:
            self._new, self._not_before = (), now + self._patience_s
            self._patience_s *= 2
        self._interval_s = FIRST_INTERVAL_S
        is_short = self._scaling.grow is not None and workers < self._pool.most_workers
        self.due = now + FIRST_INTERVAL_S if is_short else math.inf

    def hosts_to_try(self, now: float) -> list[str]:
        """Choose missing hosts to connect now."""
        self._interval_s = min(2 * self._interval_s, LONGEST_INTERVAL_S)
        self.due = now + self._interval_s
        return self._pool.hosts_to_retry(now)

    def ends(self, attempt: int, plan: WorldPlan, now: float) -> bool:
        """Return whether the checkpoint that was just committed ends the attempt, and note it if so."""
        if self._new and plan.world_size > self._workers:
            self._new, self._patience_s = (), FIRST_PATIENCE_S
        if self.due == math.inf or now < self._not_before:
            return False
        with contextlib.suppress(ResourcesError):  # a host has come back with fewer GPUs
            larger = make_plan(self._pool.connected, self._scaling)
            if larger.world_size > plan.world_size:
                self._new = [host for host in larger.hosts if host not in plan.hosts]
                self._ended, self._workers = attempt, plan.world_size
                return True
        return False

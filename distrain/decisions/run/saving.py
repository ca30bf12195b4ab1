"""The wait of a failed attempt for a checkpoint that other ranks can complete, before they are stopped.

Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distrain.system.text import name_ranks

if TYPE_CHECKING:
    from collections.abc import Collection

    from distrain.decisions.events import CheckpointsInProgress

CHECKPOINT_GRACE_S = 30.0
"""Seconds to wait, after a failure, for other ranks to store a checkpoint before they are stopped."""


class Saving:
    """The wait of one failed attempt.

    It must be possible to commit the checkpoint without the failed ranks, and it must have been in progress when the
    first one failed: what begins later does not prolong the wait.

    since: when the attempt failed. stop_by: until when ranks may save because the user wants the run to stop.
    """

    def __init__(self, since: float, stop_by: float) -> None:
        self._since, self._stop_by = since, stop_by
        self._work: CheckpointsInProgress | None = None
        self.until = since
        """When the wait ends at the latest."""

    @property
    def awaited(self) -> Collection[int]:
        """The ranks that the attempt waits for."""
        assert self._work is not None
        return {rank for rank, _ in self._work.parts} or self._work.expected.keys()

    @property
    def is_storing(self) -> bool:
        """True if ranks store a checkpoint. Others may still report their parts of one."""
        return bool(self._work and self._work.parts)

    def update(self, latest: CheckpointsInProgress, now: float) -> bool:
        """Take over what is in progress now. Return False if that changes nothing."""
        if (before := self._work) is not None:
            parts = (part for part in latest.parts if part in before.parts or part[0] in before.expected)
            expected = {rank: made for rank, made in latest.expected.items() if rank in before.expected}
            latest = replace(latest, parts=frozenset(parts), expected=expected)
        if latest == before:
            return False
        self._work = latest
        until = self._since + latest.within_s  # a report that came by then may be stored
        stored_by = min(now, until) + CHECKPOINT_GRACE_S if latest.parts else now
        until = max(until, stored_by) if latest.expected else stored_by
        self.until = min(until, max(now, self._stop_by))
        return True

    def describe(self, failed: Collection[int], now: float) -> str:
        """Say what the attempt waits for, and how long."""
        aim = "store a checkpoint" if self.is_storing else "make as many reports"
        left_s, awaited = self.until - now, name_ranks(self.awaited)
        return f"{name_ranks(failed)} failed; waiting up to {left_s:.0f} s for {awaited} to {aim}"

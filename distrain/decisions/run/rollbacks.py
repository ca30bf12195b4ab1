"""The rollbacks of one run: which are allowed, and where each one has led. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.decisions.events import RollBack, RolledBack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distrain.decisions.events import RunRequest
    from distrain.decisions.ranks import Rank


class Rollbacks:
    """The rollbacks so far. Each one ends the attempt in which a rank asked for it."""

    def __init__(self, request: RunRequest) -> None:
        self._most = request.failure_config.max_rollbacks
        self._starts_ranks = request.plan is None
        self._asked: dict[int, RollBack] = {}
        """By attempt that was ended for it."""
        self._skips = dict(request.skips)

    def of(self, attempt: int) -> RollBack | None:
        """Return what has ended this attempt, if it was a rollback."""
        return self._asked.get(attempt)

    @property
    def refusal(self) -> str | None:
        """The reason why no further one is allowed."""
        if not self._starts_ranks:
            return "no rollback: only ranks that distrain starts can go back"
        if 0 <= self._most <= len(self._asked):
            return f"no rollback: FailureConfig(max_rollbacks={self._most}) allows no more"
        return None

    def begin(self, attempt: int, rank: Rank, asked: Mapping[str, Any]) -> None:
        """Note that the attempt ends because a rank has asked to roll back."""
        host, why, skip_to = rank.plan.host, asked["why"], asked["skip_to"]
        self._asked[attempt] = RollBack(rank=rank.plan.rank, host=host, reports=rank.reports, why=why, skip_to=skip_to)

    def end(self, attempt: int, back: RolledBack, start: str) -> str:
        """Note where the run continues, and return that in words. ``start``: the name of the checkpoint."""
        asked = self._asked[attempt]
        self._skips[back.path or ""] = back.skip_to
        text = f"{asked}; back to {start}"
        if back.suspect:
            text += f", because the newer {back.suspect} has led to several rollbacks"
        if asked.skip_to:
            text += "; the rows since then are left out"
        elif asked.skip_to is not None:
            text += "; no rows are left out, as distrain knows no position in them"
        return f"{text} (rollback {len(self._asked)}{f' of {self._most}' if self._most >= 0 else ''})"

    def skip_to(self, checkpoint: str | None) -> Mapping[str, Any]:
        """Return up to where rows are left out after this checkpoint, by dataset or loader."""
        return self._skips.get(checkpoint or "", {})

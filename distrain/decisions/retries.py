"""Whether, and after how long, a failed attempt is followed by another. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distrain.config import FailureConfig
    from distrain.errors import RankFailure

LONGEST_BACKOFF_S = 300.0
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class RetryPolicy:
    """The restarts of one run. ``checkpoint``: what its first attempt starts from."""

    def __init__(self, config: FailureConfig, checkpoint: str | None = None) -> None:
        self.used = 0
        self.ever_entered = False
        """Whether any rank, in any attempt, got into train_func."""
        self.refusal: str | None = None
        """Why there is no restart, although the budget would allow one."""
        self._config = config
        self._started_from = checkpoint
        self._without_progress = 0
        self._last: object = None

    @property
    def budget(self) -> str:
        most = self._config.max_failures
        return "no limit" if most < 0 else f"of {most}"

    def allow(self, culprit: RankFailure | None, *, reports: int, checkpoint: str | None) -> bool:
        """Whether to restart after this failure (None: a hang); counts the restart if so.

        reports: how many the culprit had made. checkpoint: the latest.
        """
        repeated = self._is_repeated(culprit, reports, checkpoint)
        self._without_progress = self._without_progress + 1 if checkpoint == self._started_from else 1
        self._started_from = checkpoint
        if 0 <= self._config.max_failures <= self.used:
            return False
        if not self.ever_entered:
            self.refusal = "no restart, as no rank ever got into train_func"
        elif repeated and not self._config.retry_same_failure:
            self.refusal = (
                "no restart, as the same rank has failed twice in the same way at the same place: a bug? "
                "(FailureConfig.retry_same_failure)"
            )
        if self.refusal is None:
            self.used += 1
        return self.refusal is None

    def delay_s(self) -> float:
        """Seconds to wait before the restart."""
        doublings = min(self._without_progress - 1, 64)  # beyond what a float needs, and can hold
        return min(self._config.backoff_s * 2.0**doublings, LONGEST_BACKOFF_S)

    def _is_repeated(self, culprit: RankFailure | None, reports: int, checkpoint: str | None) -> bool:
        """Whether the culprit has raised the same as in the last attempt, after as many reports, and there was no
        checkpoint since. Signals are not counted: somebody else sends them.
        """
        before, self._last = self._last, None
        if culprit is None or culprit.kind != "exception" or culprit.role != "culprit":
            return False
        if checkpoint == self._started_from:
            self._last = (culprit.rank, _ADDRESS.sub("0x", culprit.traceback or culprit.summary), reports)
        return self._last is not None and self._last == before

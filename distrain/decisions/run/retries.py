"""The policy for restarts: whether, and after how long, a new attempt follows a failed one. Runs in: coordinator.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distrain.api.config import FailureConfig
    from distrain.errors import RankFailure

LONGEST_BACKOFF_S = 300.0
"""Upper limit of the seconds between a failure and the restart."""
_FAILED = "no restart: the same rank has failed twice in the same way at the same place"
_STRANDED = "no restart: ranks have twice waited for one that had finished"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def start_without_checkpoint(*, is_script: bool) -> str:
    """Return where ranks begin while distrain has no checkpoint, in words that follow ``from``."""
    own = "the script's own snapshot, if it keeps one (distrain has no checkpoint)"
    return own if is_script else "scratch (no checkpoint yet)"


class RetryPolicy:
    """The restarts of one run.

    is_script: the ranks run a script, which may keep snapshots of its own. Unless it reports checkpoints to distrain,
        nobody can tell whether it made progress, so that an equal failure counts as another one.
    """

    def __init__(self, config: FailureConfig, *, is_script: bool = False) -> None:
        self.used = 0
        """The number of restarts so far."""
        self.ever_entered = False
        """True if any rank of any attempt has entered train_func."""
        self.refusal: str | None = None
        """The reason why the run was not restarted although its budget allowed a restart."""
        self._config = config
        self._is_script = is_script
        self.started_from: str | None = None
        """The checkpoint that the latest attempt has started from."""
        self._without_progress = 0
        """The number of attempts in a row that have failed without a new checkpoint."""
        self._last_failure: object = None

    def __str__(self) -> str:
        """Name the latest restart, such as ``restart 1 of 3``."""
        most = self._config.max_failures
        return f"restart {self.used}" + (f" of {most}" if most >= 0 else "")

    def allow(
        self, culprit: RankFailure | None, *, reports: int, checkpoint: str | None, stranded: str | None = None
    ) -> bool:
        """Return whether to restart after a failure, and count the restart if so.

        culprit: the failure that caused the end of the attempt, or None if it hung.
        reports: number of reports that the culprit had made.
        checkpoint: the latest checkpoint.
        stranded: which ranks waited for one that had finished, if that is what has ended the attempt.
        """
        repeated = self._is_repeated(culprit, reports, checkpoint, stranded)
        self._without_progress = self._without_progress + 1 if checkpoint == self.started_from else 1
        self.started_from = checkpoint
        if self.refusal is not None or 0 <= self._config.max_failures <= self.used:
            return False
        if not self.ever_entered:
            self.refusal = "no restart: no rank has ever entered train_func"
        elif repeated and not self._config.retry_same_failure:
            self.refusal = (
                f"{_STRANDED if stranded else _FAILED}, which is probably a bug "
                "(FailureConfig(retry_same_failure=True) restarts anyway)"
            )
        if self.refusal is None:
            self.used += 1
        return self.refusal is None

    def delay_s(self) -> float:
        """Return the seconds to wait before the restart."""
        doublings = min(self._without_progress - 1, 64)  # enough to reach the limit, and no overflow of the float
        return min(self._config.backoff_s * 2.0**doublings, LONGEST_BACKOFF_S)

    def _is_repeated(
        self, culprit: RankFailure | None, reports: int, checkpoint: str | None, stranded: str | None
    ) -> bool:
        """Return whether the culprit failed as in the last attempt: same exception, as many reports, no new checkpoint.

        Also if ranks were stranded as in the last attempt. Signals do not count: another process sends them.
        """
        before, self._last_failure = self._last_failure, None
        if checkpoint != self.started_from or (self._is_script and checkpoint is None):
            return False
        if stranded is not None:
            self._last_failure = stranded
        elif culprit is not None and culprit.kind == "exception" and culprit.role == "culprit":
            self._last_failure = (culprit.rank, _ADDRESS.sub("0x", culprit.traceback or culprit.summary), reports)
        return self._last_failure is not None and self._last_failure == before

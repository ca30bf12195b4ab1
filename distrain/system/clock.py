"""A clock that can be paused. Runs in: coordinator."""

from __future__ import annotations

import time


class PausableClock:
    """``time.monotonic()`` without the time for which this clock was paused."""

    def __init__(self) -> None:
        self._behind_s = 0.0
        self._paused_at: float | None = None

    @property
    def is_paused(self) -> bool:
        """True between :meth:`pause` and :meth:`resume`."""
        return self._paused_at is not None

    def now(self) -> float:
        """Return the time in seconds."""
        return (time.monotonic() if self._paused_at is None else self._paused_at) - self._behind_s

    def pause(self) -> None:
        """Stop the clock; harmless if it is paused."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def resume(self) -> None:
        """Let the clock go on from where it was paused; harmless if it is not paused."""
        if self._paused_at is not None:
            self._behind_s += time.monotonic() - self._paused_at
            self._paused_at = None

    def monotonic(self, moment: float | None) -> float | None:
        """Return when this clock shows ``moment`` (time.monotonic), or None for no moment and while it is paused."""
        return None if moment is None or self.is_paused else moment + self._behind_s

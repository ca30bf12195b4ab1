"""The page of a run as an observer: it is written at the end of a run. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.api.observer import Ended, Fact, RunBegan
from distrain.storage.paths import RunPaths
from distrain.system.log import warn

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.api.config import RunContext
    from distrain.decisions.run_status import RunStatus

_AFTER_S = 10.0
"""A run that has finished gets its page at once if it took at least so many seconds, as a page takes up to 0.1 s."""
_LARGEST = 50 << 20
"""Bytes of metrics.jsonl up to which a page is written: it takes 5 s then (scripts/benchmark_page, a slow machine)."""


class PageAtEnd:
    """Writes the page of a run that was long enough, or has failed, unless that would take long."""

    hears = (Ended,)

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def hear(self, fact: Fact) -> None:
        assert isinstance(fact, Ended)
        is_wanted = fact.error is not None or fact.seconds >= _AFTER_S
        if not is_wanted or fact.result is None or not fact.storage_works:
            return
        metrics = RunPaths(self._directory).metrics
        try:
            if not metrics.exists() or metrics.stat().st_size <= _LARGEST:
                from distrain.page.writer import write_page  # short runs need none

                write_page(self._directory)
        except Exception as error:
            warn(f"the page of the run could not be written: {error!r}")


def observers(context: RunContext, run: RunBegan, status: RunStatus) -> list[PageAtEnd]:
    """Return the observer that writes the page of a run, unless that is on remote storage."""
    return [PageAtEnd(run.directory)] if run.location == str(run.directory) else []

"""The page of a run as an observer: it is written at the end of a run. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.api.observer import Ended
from distrain.storage.paths import RunPaths
from distrain.system.log import warn

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.api.config import RunContext
    from distrain.api.observer import Fact, RunBegan
    from distrain.decisions.run_status import RunStatus

_AFTER_S = 10.0
"""A run that has finished gets its page at once if it took at least so many seconds, as a page takes up to 0.1 s."""
_SECONDS_PER_BYTE = 100e-9
"""How long it takes to read metrics.jsonl, measured with scripts/benchmark_page on a slow machine."""
_FREE_S, _SHARE_OF_RUN, _MOST_S = 0.03, 0.02, 5.0
"""A page may take 2 percent of the time of the run, and at most 5 s."""


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
            size = metrics.stat().st_size if metrics.exists() else 0
            if size * _SECONDS_PER_BYTE <= min(_MOST_S, _FREE_S + _SHARE_OF_RUN * fact.seconds):
                from distrain.page.writer import write_page  # short runs need none

                write_page(self._directory)
        except Exception as error:
            warn(f"the page of the run could not be written: {error!r}")


def observers(context: RunContext, run: RunBegan, status: RunStatus) -> list[PageAtEnd]:
    """Return the observer that writes the page of a run, unless that is on remote storage."""
    return [PageAtEnd(run.directory)] if run.location == str(run.directory) else []

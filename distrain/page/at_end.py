"""The page of a run as an observer: it is written at the end of a run. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.api.observer import Ended

if TYPE_CHECKING:
    from pathlib import Path

    from distrain.api.config import RunContext
    from distrain.api.observer import Fact, RunBegan
    from distrain.decisions.run_status import RunStatus

_AFTER_S = 10.0
"""A run that has finished gets its page at once if it took at least so many seconds, as a page takes up to 0.1 s."""


class PageAtEnd:
    """Writes the page of a run that was long enough, or has failed."""

    hears = (Ended,)

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def hear(self, fact: Fact) -> None:
        assert isinstance(fact, Ended)
        is_wanted = fact.error is not None or fact.seconds >= _AFTER_S
        if is_wanted and fact.result is not None and fact.storage_works:
            from distrain.page.writer import write_page_at_end  # short runs need none

            write_page_at_end(self._directory, fact.seconds)


def observers(context: RunContext, run: RunBegan, status: RunStatus) -> list[PageAtEnd]:
    """Return the observer that writes the page of a run, unless that is on remote storage."""
    return [PageAtEnd(run.directory)] if run.location == str(run.directory) else []

"""The console of a run in a notebook: one block that changes in place, and text below it. Runs in: coordinator.

What it shows is saved in the notebook, so that it has to stay small, however long the run is.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from distrain.console.footer import footer
from distrain.console.live_console import LiveConsole
from distrain.system.log import print_to
from distrain.system.notebook import Block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.decisions.run_status import RunStatus

_MOST_PRINTED = 100_000
"""Characters of output that are printed. What comes later is in the logs only."""
_LEAST_OF_A_LINE = 100
"""Characters for which a line counts at least, so that 1,000 lines are printed at most."""
_COLUMNS = 120


class NotebookConsole(LiveConsole):
    """A notebook. logs: the directory that has all output of the ranks."""

    def __init__(self, status: RunStatus, logs: str, **options: Any) -> None:
        super().__init__(status, **options)
        self._logs = logs
        self._block = Block()
        self._room = _MOST_PRINTED
        self._is_over = False

    def close(self) -> None:
        self._is_over = True
        super().close()

    def _show_summary(self, text: str) -> None:
        self._block.show(text)

    def _print_lines(self, lines: Sequence[str]) -> None:
        printed = ""
        for line in lines:
            if self._room <= 0:
                break
            printed += f"{line}\n"
            self._room -= max(len(line), _LEAST_OF_A_LINE)
            if self._room <= 0:
                printed += f"distrain: the output from here on is in {self._logs}\n"
        if printed:
            print_to(sys.stdout, printed)

    def _draw(self, now: float) -> None:
        interrupt = None if self._is_over else "■ Interrupt"
        lines = footer(self.status, now, width=_COLUMNS, interrupt=interrupt, bar=self._bar)
        self._block.show(self._painted(lines).rstrip())

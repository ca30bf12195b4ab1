"""The console of a run in a notebook: one block that changes in place, and text below it. Runs in: coordinator.

What it shows is saved in the notebook, so that it has to stay small, however long the run is.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

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
_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)
_GREEN, _YELLOW, _RED, _BLUE = (46, 158, 68), (184, 134, 11), (217, 54, 62), (63, 127, 217)
_COLOURS = TerminalTheme(_WHITE, _BLACK, [_BLACK, _RED, _GREEN, _YELLOW, _BLUE, (160, 80, 200), (23, 145, 155), _WHITE])
"""Colours that can be read on white and on black."""
_BLOCK = (
    '<pre style="margin:0.2em 0; padding:0.1em 0 0.1em 0.8em; border-left:3px solid rgb(63,127,217); background:none; '
    'color:inherit; font-size:var(--jp-code-font-size, inherit); line-height:1.35; white-space:pre-wrap">{html}</pre>'
)


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
        self._show_block([Text(line) for line in text.split("\n")])

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
        self._show_block(footer(self.status, now, width=_COLUMNS, interrupt=interrupt, bar=self._bar))

    def _show_block(self, lines: Sequence[Text]) -> None:
        shown = Text("\n").join(lines)
        self._block.show(shown.plain, _BLOCK.format(html=_html(shown)))


def _html(text: Text) -> str:
    """Return a text as HTML. The browser wraps long lines."""
    painter = Console(
        file=io.StringIO(), record=True, width=10 * _COLUMNS, color_system="truecolor", force_terminal=True,
        force_jupyter=False, highlight=False,
    )  # fmt: skip
    painter.print(text)
    return painter.export_html(theme=_COLOURS, code_format="{code}", inline_styles=True).rstrip()

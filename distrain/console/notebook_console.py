"""The console of a run in a notebook: one block that changes in place, and text below it. Runs in: coordinator.

What it shows is saved in the notebook, so that it has to stay small, however long the run is.
"""

from __future__ import annotations

import sys
from collections import deque
from html import escape
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from distrain.console.footer import footer
from distrain.console.live_console import LiveConsole
from distrain.system.log import print_to
from distrain.system.notebook import Block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.style import Style

    from distrain.decisions.run_status import RunStatus

_MOST_PRINTED = 100_000
"""Characters of output that are printed. What comes later is shown in the block, a few lines at a time."""
_LEAST_OF_A_LINE = 100
"""Characters for which a line counts at least, so that 1,000 lines are printed at most."""
_LATEST_LINES = 10
_COLUMNS = 120
_ALL_ROWS = 100
_COLOURS = {"green": "#2e9e44", "yellow": "#b8860b", "red": "#d9363e", "blue": "#3f7fd9", "cyan": "#17919b"}
"""By name: colours that can be read on white and on black."""
_PHASES = {"finished": "green", "failed": "red"} | dict.fromkeys(
    ("stopping", "restarting", "waiting", "aborted"), "yellow"
)
"""By phase of the run: the colour of the line beside the block."""
_BLOCK = (
    '<pre style="margin:0.2em 0; padding:0.1em 0 0.1em 0.8em; border-left:3px solid {colour}; background:none; '
    'color:inherit; font-size:var(--jp-code-font-size, inherit); line-height:1.35; white-space:pre-wrap">{html}</pre>'
)


class NotebookConsole(LiveConsole):
    """A notebook.

    logs: the directory that has all output of the ranks.
    """

    def __init__(self, status: RunStatus, logs: str) -> None:
        super().__init__(status)
        self._logs = logs
        self._block = Block()
        self._room = _MOST_PRINTED
        self._latest: deque[str] = deque(maxlen=_LATEST_LINES)
        """The last lines that came after the room was used up."""
        self._is_over = False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.status.phase = "failed"
        self.close()

    def close(self) -> None:
        self._is_over = True
        super().close()

    def show_summary(self, text: str) -> None:
        self._show([Text(line) for line in text.split("\n")])

    def _print_lines(self, lines: Sequence[str]) -> None:
        printed = ""
        for line in lines:
            if self._room <= 0:
                self._latest.append(line)
                continue
            printed += f"{line}\n"
            self._room -= max(len(line), _LEAST_OF_A_LINE)
            if self._room <= 0:
                printed += f"distrain: from here on, the block above shows the newest lines; all are in {self._logs}\n"
        if printed:
            print_to(sys.stdout, printed)

    def _draw(self, now: float) -> None:
        interrupt = None if self._is_over else "■ Interrupt"
        self._show(footer(self.status, now, width=_COLUMNS, rows=_ALL_ROWS, interrupt=interrupt))

    def _show(self, lines: Sequence[Text]) -> None:
        if self._latest:
            texts = [Text.from_ansi(line) for line in self._latest]
            for text in texts:
                text.truncate(_COLUMNS, overflow="ellipsis")
            lines = [*lines, Text(f"the newest lines; all are in {self._logs}", style="dim"), *texts]
        colour = _COLOURS[_PHASES.get(self.status.shown_phase, "blue")]
        html = _BLOCK.format(colour=colour, html="\n".join(map(_html, lines)))
        self._block.show("\n".join(line.plain for line in lines), html)


def _html(line: Text) -> str:
    return "".join(_span(segment.text, segment.style) for segment in _PAINTER.render(line)).rstrip("\n")


def _span(text: str, style: Style | None) -> str:
    css = _css(style) if style else ""
    return f'<span style="{css}">{escape(text)}</span>' if css else escape(text)


def _css(style: Style) -> str:
    """Return what a style is in CSS, without backgrounds: nobody knows that of the notebook."""
    parts = ["font-weight:bold"] if style.bold else []
    parts += ["opacity:0.6"] if style.dim else []
    if style.color is not None and not style.color.is_default:
        name = style.color.name.removeprefix("bright_")
        parts.append(f"color:{_COLOURS.get(name) or style.color.get_truecolor().hex}")
    return ";".join(parts)


_PAINTER = Console(width=10 * _COLUMNS)  # the browser wraps long lines

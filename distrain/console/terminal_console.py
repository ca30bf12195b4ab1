"""The console of a run on a terminal: lines above a footer. Runs in: coordinator."""

from __future__ import annotations

import io
import time
from collections import deque
from typing import TYPE_CHECKING

from rich.console import Console

from distrain.console.footer import footer
from distrain.console.live_console import LiveConsole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.decisions.run_status import RunStatus
    from distrain.system.consoles import Footer


_MOST_HELD = 200


class TerminalConsole(LiveConsole):
    """A terminal. ``pinned``: the footer, still empty."""

    def __init__(self, status: RunStatus, pinned: Footer) -> None:
        super().__init__(status)
        self._footer = pinned
        self._is_lent = False
        self._held: deque[str] = deque(maxlen=_MOST_HELD)
        """The last lines that came while another program used the terminal."""
        self._left_out = 0
        self._painter = Console(
            file=io.StringIO(), force_terminal=True, highlight=False, legacy_windows=False, soft_wrap=True
        )

    def lend_terminal(self, is_lent: bool) -> None:
        if is_lent:
            self.flush(time.monotonic())
        self._is_lent = is_lent
        held, left_out = list(self._held), self._left_out
        self._held.clear()
        self._left_out = 0
        if left_out:
            held.insert(0, f"distrain: {left_out} earlier lines are not shown; the logs have them")
        self._print_lines(held)
        self.flush(time.monotonic())

    def close(self) -> None:
        super().close()
        self._footer.close()

    def _print_lines(self, lines: Sequence[str]) -> None:
        if self._is_lent:
            self._left_out += max(0, len(self._held) + len(lines) - _MOST_HELD)
            self._held.extend(lines)
        else:
            self._footer.print_above("".join(f"{line}\n" for line in lines).encode())

    def _draw(self, now: float) -> None:
        if self._is_lent:
            self._footer.show("")
            return
        columns, rows = self._footer.size()
        self._painter.file = text = io.StringIO()
        for line in footer(self.status, now, width=columns, rows=rows, interrupt="Ctrl-C"):
            self._painter.print(line)
        self._footer.show(text.getvalue())

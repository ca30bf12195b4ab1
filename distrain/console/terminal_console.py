"""The console of a run on a terminal: lines above a footer. Runs in: coordinator, attach."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rich.console import Console

from distrain.console.footer import footer
from distrain.console.live_console import LiveConsole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrain.decisions.run_status import RunStatus
    from distrain.system.consoles import Footer


class TerminalConsole(LiveConsole):
    """A terminal. ``pinned``: the footer, still empty."""

    def __init__(self, status: RunStatus, pinned: Footer, **options: Any) -> None:
        super().__init__(status, **options)
        self._footer = pinned
        self._painter = Console(
            file=io.StringIO(), force_terminal=True, highlight=False, legacy_windows=False, soft_wrap=True
        )

    def close(self) -> None:
        super().close()
        self._footer.close()

    def _print_lines(self, lines: Sequence[str]) -> None:
        self._footer.print_above("".join(f"{line}\n" for line in lines).encode())

    def _draw(self, now: float) -> None:
        self._painter.file = text = io.StringIO()
        for line in footer(self.status, now, width=self._footer.width(), interrupt="Ctrl-C", bar=self._bar):
            self._painter.print(line)
        self._footer.show(text.getvalue())

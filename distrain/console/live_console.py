"""Consoles that are drawn anew every second: a terminal, and the base of notebooks. Runs in: coordinator."""

from __future__ import annotations

import io
import math
import re
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from rich.console import Console

from distrain.console.folding import Folding
from distrain.console.footer import footer
from distrain.console.run_console import RunConsole
from distrain.system.text import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.text import Text

    from distrain.console.folding import FoldedLine
    from distrain.decisions.run_status import RunStatus
    from distrain.system.consoles import Footer

_REDRAW_S = 1.0
_LINES_TOGETHER_S = 0.05
"""Lines that come within this time are printed together, as that costs time, and drawing anew after them."""
_NUMBERS = re.compile(rb"[\d.,:]+")


class LiveConsole(RunConsole):
    """The base of terminals and notebooks: equal lines of several ranks are one line, and every line has its time."""

    has_footer = True

    def __init__(self, status: RunStatus, **options: Any) -> None:
        super().__init__(status, shows_progress=False, **options)
        self._painter = Console(
            file=io.StringIO(), force_terminal=True, force_jupyter=False, highlight=False, legacy_windows=False,
            soft_wrap=True,
        )  # fmt: skip
        self._folding = Folding(0)
        self._drawn_at = -_REDRAW_S
        self._printed_at = 0.0

    @abstractmethod
    def _print_lines(self, lines: Sequence[str]) -> None:
        """Print lines, which have no line ends."""

    @abstractmethod
    def _draw(self, now: float) -> None:
        """Show how far the run is."""

    @property
    def _bar(self) -> tuple[int, str] | None:
        """The progress bar to show, with its rank: that of the lowest rank that has one."""
        return min(((rank, bar) for rank, bar in self._bars.items() if bar), default=None)

    def _begin(self, ranks: int) -> None:
        self._folding = Folding(ranks)
        self._drawn_at = -_REDRAW_S  # draw at the next tick: the state of the run changes right after this

    def _print(self, rank: int, stream: int, block: bytes, now: float, *, is_bar: bool) -> None:
        for line in block[:-1].split(b"\n"):
            self._folding.add(rank, stream, line, now, _NUMBERS.sub(b"", line) if is_bar else None)

    def deadline(self) -> float:
        redraw = self._drawn_at + _REDRAW_S
        due = self._folding.deadline()
        return redraw if due is None else min(redraw, max(due, self._printed_at + _LINES_TOGETHER_S))

    def tick(self, now: float) -> None:
        if now >= self._printed_at + _LINES_TOGETHER_S:
            self._print_all(self._folding.take(now), now)
        if now >= self._drawn_at + _REDRAW_S:
            self._draw_at(now)

    def flush(self, now: float) -> None:
        self._print_all(self._folding.take(math.inf), now)
        self._draw_at(now)

    def _print_all(self, lines: Iterable[FoldedLine], now: float) -> None:
        wall = time.time() - now
        texts = [f"{_clock(wall + line.at)} {self._folded_prefix(line)}{line.text.decode()}" for line in lines]
        if texts:
            self._print_lines(texts)
            self._printed_at = now

    def _folded_prefix(self, line: FoldedLine) -> str:
        if len(line.ranks) == 1:
            return self._prefix(next(iter(line.ranks)))
        return f"[rank {rank_list(line.ranks).replace(', ', ',')}] "

    def _painted(self, lines: Iterable[Text]) -> str:
        """Return lines with the colours of a terminal, which notebooks know, too."""
        with self._painter.capture() as painted:
            for line in lines:
                self._painter.print(line)
        return painted.get()

    def _draw_at(self, now: float) -> None:
        self._drawn_at = now
        self._draw(now)


class TerminalConsole(LiveConsole):
    """A terminal. pinned: the footer, still empty. stops: False if Ctrl-C does not stop the run."""

    def __init__(self, status: RunStatus, pinned: Footer, *, stops: bool = True, **options: Any) -> None:
        super().__init__(status, **options)
        self._footer = pinned
        self._stops = stops

    def close(self) -> None:
        super().close()
        self._footer.close()

    def _print_lines(self, lines: Sequence[str]) -> None:
        self._footer.print_above("".join(f"{line}\n" for line in lines).encode())

    def _draw(self, now: float) -> None:
        width = self._footer.width()
        lines = footer(self.status, now, width=width, interrupt="Ctrl-C", stops=self._stops, bar=self._bar)
        self._footer.show(self._painted(lines))


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))

"""The console of a run: only lines, or lines above a footer that shows how far the run is. Runs in: coordinator."""

from __future__ import annotations

import io
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console

from distrain.console.folding import Folding
from distrain.console.footer import footer
from distrain.console.status_lines import StatusLines
from distrain.decisions.failures import rank_list
from distrain.system.consoles import Footer
from distrain.system.log import print_to, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distrain.console.folding import FoldedLine
    from distrain.console.run_status import RunStatus

_REDRAW_S = 1.0
_LINES_TOGETHER_S = 0.05
"""Lines that come within this time are printed together, as the footer is drawn anew after them."""
_NUMBERS = re.compile(rb"[\d.,:]+")


class RunConsole:
    """A console that gets lines: those of the ranks, each with its rank, and now and then one about the progress.

    shows_progress: False leaves out the latter.
    """

    has_footer = False

    def __init__(self, status: RunStatus, *, shows_progress: bool = True) -> None:
        self.status = status
        self._lines = StatusLines(status) if shows_progress else None
        self._width = 1
        self._has_many_hosts = False

    def __enter__(self) -> RunConsole:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin_attempt(self, hosts: Sequence[str]) -> None:
        """Begin an attempt. ``hosts``: the host of each rank."""
        self.status.begin_attempt(hosts, time.monotonic())
        self._width = len(str(len(hosts) - 1))
        self._has_many_hosts = len(set(hosts)) > 1

    def print(self, rank: int, stream: int, block: bytes, *, is_bar: bool = False) -> None:
        """Print whole lines of a rank.

        stream: 1 for stdout, 2 for stderr.
        block: UTF-8 without control characters, with a line end. is_bar: it is a progress bar that has ended.
        """
        self.print_as_it_is(rank, stream, block)

    def print_as_it_is(self, rank: int, stream: int, block: bytes) -> None:
        """Print whole lines of a rank without their time, and do not join them with those of others."""
        prefix = self._prefix(rank).encode()
        lines = block[:-1].replace(b"\n", b"\n" + prefix)
        print_to(sys.stdout if stream == 1 else sys.stderr, b"".join((prefix, lines, b"\n")))

    def _prefix(self, rank: int) -> str:
        host = f" {self.status.ranks[rank].host}" if self._has_many_hosts else ""
        return f"[rank {rank:>{self._width}}{host}] "

    def report(
        self, rank: int, index: int, metrics: Mapping[str, Any], progress: Sequence[float] | None, now: float
    ) -> None:
        """Take a report of a rank."""
        self.status.reported(rank, index, metrics, progress, now)
        if rank == 0 and self._lines is not None:
            self._lines.reported(now)

    def hide_footer(self, is_hidden: bool) -> None:
        """Show no footer while another program uses the terminal."""

    def deadline(self) -> float | None:
        """Return when to call :meth:`tick` (time.monotonic), or None."""
        return self._lines.deadline() if self._lines else None

    def tick(self, now: float) -> None:
        """Show what is due by now."""
        if (due := self.deadline()) is not None and now >= due:
            self.flush(now)

    def flush(self, now: float) -> None:
        """Show everything that waits to be shown."""
        if self._lines is not None:
            self._lines.flush(now)

    def close(self) -> None:
        self.flush(time.monotonic())


class LiveConsole(RunConsole):
    """A terminal. Equal lines of several ranks are one line, every line has its time, and a footer shows the progress.

    pinned: the footer, still empty.
    """

    has_footer = True

    def __init__(self, status: RunStatus, pinned: Footer) -> None:
        super().__init__(status, shows_progress=False)
        self._footer = pinned
        self._folding = Folding(0)
        self._drawn_at = -_REDRAW_S
        self._printed_at = 0.0
        self._is_hidden = False
        self._painter = Console(
            file=io.StringIO(), force_terminal=True, highlight=False, legacy_windows=False, soft_wrap=True
        )

    def begin_attempt(self, hosts: Sequence[str]) -> None:
        self.flush(time.monotonic())
        super().begin_attempt(hosts)
        self._folding = Folding(len(hosts))

    def print(self, rank: int, stream: int, block: bytes, *, is_bar: bool = False) -> None:
        now = time.monotonic()
        for line in block[:-1].split(b"\n"):
            self._folding.add(rank, stream, line, now, _NUMBERS.sub(b"", line) if is_bar else None)

    def hide_footer(self, is_hidden: bool) -> None:
        if is_hidden != self._is_hidden:
            self._is_hidden = is_hidden
            self.flush(time.monotonic())

    def deadline(self) -> float:
        redraw = self._drawn_at + _REDRAW_S
        due = self._folding.deadline()
        return redraw if due is None else min(redraw, max(due, self._printed_at + _LINES_TOGETHER_S))

    def tick(self, now: float) -> None:
        if now >= self._printed_at + _LINES_TOGETHER_S:
            self._print_all(self._folding.take(now), now)
        if now >= self._drawn_at + _REDRAW_S:
            self._draw(now)

    def flush(self, now: float) -> None:
        self._print_all(self._folding.take_all(), now)
        self._draw(now)

    def close(self) -> None:
        super().close()
        self._footer.close()

    def _print_all(self, lines: Iterable[FoldedLine], now: float) -> None:
        wall = time.time() - now
        text = bytearray()
        for line in lines:
            clock = time.strftime("%H:%M:%S", time.localtime(wall + line.at))
            text += f"{clock} {self._folded_prefix(line)}".encode() + line.text + b"\n"
        if text:
            self._footer.print_above(bytes(text))
            self._printed_at = now

    def _folded_prefix(self, line: FoldedLine) -> str:
        if len(line.ranks) == 1:
            return self._prefix(next(iter(line.ranks)))
        return f"[rank {rank_list(line.ranks).replace(', ', ',')}] "

    def _draw(self, now: float) -> None:
        self._drawn_at = now
        columns, rows = self._footer.size()
        self._painter.file = text = io.StringIO()
        for line in [] if self._is_hidden else footer(self.status, now, width=columns, rows=rows):
            self._painter.print(line)
        self._footer.show(text.getvalue())


def open_console(progress: str, status: RunStatus) -> RunConsole:
    """Return the console of a run. Use it as a context; every line that the run prints belongs into that.

    progress: the value of ``RunConfig.progress``.
    """
    if progress in ("auto", "live"):
        if (pinned := Footer.pin()) is not None:
            return LiveConsole(status, pinned)
        if progress == "live":
            warn("progress='live' has no effect: stdout and stderr are not one terminal, or another run uses it")
    return RunConsole(status, shows_progress=progress != "off")

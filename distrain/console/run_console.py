"""The console of a run that is no terminal and no notebook: only lines. Runs in: coordinator."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from distrain.console.status_lines import StatusLines
from distrain.system.log import print_to, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distrain.decisions.run_status import RunStatus


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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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

    def show_summary(self, text: str) -> None:
        """Show the last lines of the run. The console is closed by then."""
        say(text)

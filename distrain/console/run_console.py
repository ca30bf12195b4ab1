"""The console of a run that is neither a terminal nor a notebook: only lines. Runs in: coordinator."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from distrain.api.observer import AttemptBegan, AttemptEnded, Ended, Printed, Reported
from distrain.system.log import print_to, say, warn
from distrain.system.output_lines import LineCutter, readable
from distrain.system.text import broken, duration, flatten, number, printable, rate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from distrain.api.observer import Fact
    from distrain.decisions.run_status import RunStatus

INTERVAL_S = 30.0
"""Seconds between two lines about the progress. metrics.jsonl has all reports."""
_MOST_METRICS = 12
"""Metrics in the last lines of a run."""


class RunConsole:
    """A console that gets lines: those of the ranks, each with its rank, and now and then one about the progress.

    The latter comes with the first report of rank 0, then at most once per :data:`INTERVAL_S`, and with the last one.

    shows_progress: False leaves it out. ranks: those whose output is shown; None for all.
    """

    hears = (Printed, Reported, AttemptBegan, AttemptEnded, Ended)
    has_footer = False

    def __init__(self, status: RunStatus, *, shows_progress: bool = True, ranks: Collection[int] | None = None) -> None:
        self.status = status
        self._shows_progress = shows_progress
        self._shown_at = -INTERVAL_S
        self._has_warned_of_nan = False
        self._has_news = False
        """True if rank 0 has made a report that was not shown."""
        self._shown_ranks = None if ranks is None else frozenset(ranks)
        self._streams: dict[tuple[int, int], LineCutter] = {}
        """By rank and stream: what it has printed in this attempt."""
        self._bars: dict[int, str] = {}
        """By rank: the newest state of its progress bar, such as one of tqdm."""
        self._width = 1
        self._has_many_hosts = False

    def hear(self, fact: Fact) -> None:
        match fact:
            case Printed():
                if self._shown_ranks is None or fact.rank in self._shown_ranks:
                    self._feed(fact)
            case Reported():
                self._warn_of_nan(fact)
                if fact.rank == 0 and self._shows_progress:
                    self._has_news = True
                    self.tick(fact.now)
            case AttemptBegan(hosts=hosts):
                self._width, self._has_many_hosts = len(str(len(hosts) - 1)), len(set(hosts)) > 1
                self._begin(len(hosts))
            case AttemptEnded():
                self._end_streams()
                self.flush(time.monotonic())
            case Ended():
                self.close()
                if fact.result is not None:
                    self._show_summary(summary(fact, self.status))

    def _warn_of_nan(self, report: Reported) -> None:
        """Name the first metric of the run that becomes NaN: the training rarely recovers from it."""
        nan = [printable(name) for name, value in flatten(report.metrics).items() if value != value]
        if nan and not self._has_warned_of_nan:
            self._has_warned_of_nan = True
            warn(
                f"rank {report.rank} reported {nan[0]}=nan in report {report.number}. Common causes: the learning rate "
                "is too high, or gradients need clipping. If it is a bad batch, go back and skip it: "
                f"FailureConfig(on_nan='rollback', nan_metric={nan[0]!r})",
                of_console=True,
            )

    def _begin(self, ranks: int) -> None:
        """Begin an attempt with so many ranks."""

    def _show_summary(self, text: str) -> None:
        say(text, of_console=True)

    # -- output ---------------------------------------------------------------------------------------------------

    def _feed(self, printed: Printed) -> None:
        rank, stream = printed.rank, printed.stream
        cutter = self._streams.get((rank, stream))
        if cutter is None:
            cutter = self._streams[rank, stream] = LineCutter(has_footer=self.has_footer)
        had_bar = cutter.is_bar
        self._show(rank, stream, cutter.feed(printed.data, printed.now), printed.now)
        if had_bar or cutter.is_bar:
            self._bars[rank] = cutter.bar

    def _end_streams(self) -> None:
        """Show the last lines, even without a line end."""
        for (rank, stream), cutter in self._streams.items():
            self._show(rank, stream, cutter.end(), time.monotonic())
        self._streams.clear()
        self._bars.clear()

    def _show(self, rank: int, stream: int, block: bytes, now: float) -> None:
        if block:
            self._print(rank, stream, readable(block, rank), now, is_bar=b"\r" in block)

    def _print(self, rank: int, stream: int, block: bytes, now: float, *, is_bar: bool) -> None:
        """Print whole lines of a rank.

        stream: 1 for stdout, 2 for stderr.
        block: UTF-8 without control characters, with a line end. now: when it was printed (time.monotonic).
        is_bar: it is a progress bar that has ended.
        """
        prefix = self._prefix(rank).encode()
        lines = block[:-1].replace(b"\n", b"\n" + prefix)
        print_to(sys.stdout if stream == 1 else sys.stderr, b"".join((prefix, lines, b"\n")))

    def _prefix(self, rank: int) -> str:
        host = f" {self.status.ranks[rank].host}" if self._has_many_hosts else ""
        return f"[rank {rank:>{self._width}}{host}] "

    # -- time -----------------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """Return when to call :meth:`tick` (time.monotonic), or None."""
        return self._shown_at + INTERVAL_S if self._has_news else None

    def tick(self, now: float) -> None:
        """Show what is due by now."""
        if (due := self.deadline()) is not None and now >= due:
            self.flush(now)

    def flush(self, now: float) -> None:
        """Show everything that waits to be shown."""
        if self._has_news:
            say(status_line(self.status), of_console=True)
            self._has_news, self._shown_at = False, now

    def close(self) -> None:
        self._end_streams()
        self.flush(time.monotonic())


# -- the progress, and the end ---------------------------------------------------------------------------------------


def status_line(status: RunStatus) -> str:
    """Return the progress and the metrics of rank 0 in one line."""
    speed, left = status.rate(), status.left_s()
    if status.progress is None:
        parts = [f"report {status.reports}"]
    else:
        done, total = status.progress
        parts = [f"{number(done)}/{number(total)} ({done / total if total else 1:.0%})"]
    parts += [rate(speed)] if speed else []
    parts += [f"{duration(left)} left"] if left else []
    metrics = (f"{printable(name)}={number(value)}" for name, value in status.metrics.items())
    return f"{', '.join(parts)}: {', '.join(metrics) or 'no metrics'}"


def summary(ended: Ended, status: RunStatus) -> str:
    """Return the last lines of a run: how it ended, how long it took, its metrics and checkpoints."""
    lines = [f"{ended.how} after {duration(ended.seconds)}{broken(status.metrics)}; results in {status.location}"]
    return "\n    ".join([*lines, *_details(ended, status)])


def _details(ended: Ended, status: RunStatus) -> Iterator[str]:
    yield f"started:     {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(time.time() - ended.seconds))}"
    if status.restarts:
        yield f"restarts:    {status.restarts}" + (f", which cost {duration(status.lost_s)}" if status.lost_s else "")
    if reports := status.reports:
        speed = status.rate()
        yield f"reports:     {reports:,} of rank 0" + (f", {rate(speed)} at the end" if speed else "")
    elif any(rank.reports for rank in status.ranks):
        yield "reports:     none of rank 0, so Result.metrics is None; metrics.jsonl has those of the other ranks"
    if status.metrics:
        yield f"metrics:     {shown_metrics(status.metrics)}"
    if ended.checkpoints:
        kept = f", {len(ended.checkpoints)} kept" if len(ended.checkpoints) > 1 else ""
        yield f"checkpoints: {ended.checkpoints[-1].path.name}{kept}"
    if ended.advice:
        yield f"continue:    {ended.advice}"


def shown_metrics(metrics: Mapping[str, Any]) -> str:
    """Return metrics in one line; of many, the first ones."""
    shown = [f"{printable(name)}={number(value)}" for name, value in metrics.items()][:_MOST_METRICS]
    others = len(metrics) - len(shown)
    return ", ".join(shown) + (f", and {others} others" if others else "")

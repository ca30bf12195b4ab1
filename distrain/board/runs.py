"""The runs of a storage path as rows of a table, kept up to date from their files. Runs in: the process of the board.

A file of lines is read once, and then only what has been added to it. Nobody waits for that: long files are read a
little at a time (:meth:`Board.read`), and a row says how much of them is still unread.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.page.reports import DAMAGE, Reports, beginnings
from distrain.storage import names
from distrain.storage.lines import MOST_OF_LINES, Tail, read_events, read_metrics
from distrain.storage.runs.details import hang_of, hangs_in
from distrain.storage.runs.listing import FINISHED, FOREIGN, RUNNING, STARTING, Run, folders_in, number_in, run_at
from distrain.system.text import flatten, size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


_LOOK_S = 0.8
"""Seconds between two looks at all runs. They may be asked for more often."""
_CHUNK, _MOST_OF_END = 64 << 10, 1 << 20
"""Bytes of a file that are read at once, and in which the last report is searched at first: nobody waits long."""
MOST_POINTS = 512
"""Of a curve in memory. There may be thousands of curves."""
SPARKLINE = 40
"""Points of the small curves in the table."""
_SAMPLES = 20
"""Reports over which the rate is measured."""
_MOST_METRICS, _LONGEST, _MOST_HOSTS = 100, 300, 8


class WatchedRun:
    """A run at the last look, and what was read of its files.

    version: of the board at its last change. unread: bytes that were there at the last look, and are not read yet.
    """

    def __init__(self, path: str) -> None:
        self.run = Run(os.path.basename(path), path, FOREIGN)
        self.version = self.unread = 0
        self._stamp: list[tuple[int, int, int] | None] = []
        self._begin()

    def _begin(self) -> None:
        self._tails = {name: Tail(most=_CHUNK) for name in (names.EVENTS, names.METRICS)}
        self._reports = Reports(self.run.attempts, MOST_POINTS)
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._last = self.run.last_report(_MOST_OF_END) or {}  # long files take a while
        self._hangs: list[dict[str, Any]] = []
        """The last event of a hang."""
        self._troubles: dict[object, str] = {}
        """The troubles of this moment: those of the memory or a GPU of a rank."""

    def look(self) -> bool:
        """Look if the run has changed; return whether its row has. What was added to its files is not read yet."""
        before, stamp = self.run, [_stamp(f"{self.run.path}/{name}") for name in (names.MANIFEST, names.NOTES)]
        if stamp == self._stamp and before.state not in (RUNNING, STARTING, FOREIGN):
            return False
        self._stamp, self.run = stamp, run_at(before.path)
        sizes = {name: (_stamp(f"{before.path}/{name}") or (0, 0))[1] for name in self._tails}
        has_lost_lines = any(size < self._tails[name].position for name, size in sizes.items())
        if has_lost_lines or beginnings(self.run) != beginnings(before):  # a restart repeats reports
            self._begin()
        self.unread = sum(sizes.values()) - self._done
        return self.run != before

    @property
    def _done(self) -> int:
        return sum(tail.position for tail in self._tails.values())

    def read(self) -> None:
        """Read the next lines of the files."""
        before, folder = self._done, Path(self.run.path)
        with suppress(OSError):  # it has been deleted, or is a stranger's
            for event in read_events(folder / names.EVENTS, self._tails[names.EVENTS]):
                self._add_event(event)
        with suppress(OSError):
            for record in read_metrics(folder / names.METRICS, most=MOST_OF_LINES, tail=self._tails[names.METRICS]):
                self._add_report(record)
        done = self._done - before
        self.unread = max(0, self.unread - done) if done else 0

    def _add_event(self, event: dict[str, Any]) -> None:
        self._hangs = hangs_in([event]) or self._hangs
        match event:
            case {"event": "trouble", "host": host, "rank": rank, "problem": problem, "text": text}:
                self._troubles[str((host, rank, problem))] = f"rank {rank} on {host}: {text}"
            case {"event": "trouble_over", "host": host, "rank": rank, "problem": problem}:
                self._troubles.pop(str((host, rank, problem)), None)

    def _add_report(self, record: dict[str, Any]) -> None:
        with suppress(*DAMAGE):
            if self._reports.last and self._reports.last["attempt"] != record["attempt"]:
                self._samples.clear()
            self._reports.add(record)
            done = record["progress"][0] if "progress" in record else record["index"]
            self._samples.append((float(record["time"]), float(done)))
            if self._last.get("time", 0.0) <= record["time"]:
                self._last = self._reports.last or {}

    def row(self, metrics: Sequence[str], most: int) -> dict[str, Any]:
        """Return the row, with the curves of metrics; ``""``: the loss, or the first one.

        ``times``: of a large curve, the reports, each with the seconds since the start of the run.
        """
        run, last, found = self.run, self._last, self._reports.curves
        first = "loss" if "loss" in found else next(iter(found), "")
        wanted = [name or first for name in metrics]
        rate, interval = self._pace()
        times = self._reports.times.points(most) if most > SPARKLINE else []
        start = number_in(run.manifest.get("started")) or run.began
        return {
            "name": run.name,
            "state": run.state,
            "began": run.began,
            "ended": run.until,
            "script": run.script[:_LONGEST],
            "attempts": len(run.attempts_now),
            "hosts": list(run.hosts)[:_MOST_HOSTS],
            "more_hosts": max(0, len(run.hosts) - _MOST_HOSTS),
            "ranks": run.ranks,
            "step": last.get("step"),
            "reported": last.get("time"),
            "progress": last.get("progress"),
            "rate": rate,
            "interval": interval,
            "metrics": _plain(self._reports.last_metrics) | _plain(last.get("metrics")),
            "settings": _plain(run.settings),
            "note": self._note()[:_LONGEST],
            "text": run.notes.text[:_LONGEST],
            "tags": run.notes.tags[:_MOST_METRICS],
            "unread": self.unread,
            "times": [(step, round(at - start, 1)) for step, at in times],
            "curves": {name: one.drawn(most) for name, one in found.items() if name in wanted},
        }

    def _pace(self) -> tuple[float | None, float]:
        """Return the steps of the progress, or the reports, per second, and the seconds between two reports."""
        if len(self._samples) < 2:
            return None, 0.0
        (first, done), (last, more) = self._samples[0], self._samples[-1]
        interval = (last - first) / (len(self._samples) - 1)
        return (more - done) / (last - first) if more > done and last > first else None, interval

    def _note(self) -> str:
        """Return what is wrong, or why the run has ended, and what was wrong then."""
        cut = {name: tail.left_out for name, tail in self._tails.items() if tail.left_out}
        left_out = [f"the first {size(count)} of {name} were left out" for name, count in cut.items()]
        if self.run.problem or self.run.state == FINISHED:
            return self.run.problem or "; ".join(left_out)
        hang = hang_of(self.run, self._last or None, self._hangs)
        hung = [str(hang["text"])] if hang else []
        if self.run.is_active:
            return "; ".join([*hung, *self._troubles.values(), *left_out])
        ends = [str(one["failure"])[:_LONGEST] for one in self.run.attempts_now if one.get("failure")]
        return "; ".join([*ends[-1:], *hung, *left_out])


class Board:
    """The runs in a local storage path. ``version`` grows with each change that a row shows.

    jobs: returns jobs that wait, or have their run directory elsewhere, as runs; it gets the known run directories.
    """

    def __init__(self, storage: Path, jobs: Callable[[Collection[str]], Sequence[Run]] = lambda known: ()) -> None:
        self.storage = storage
        self._jobs = jobs
        self.version = 0
        self._runs: dict[str, WatchedRun] = {}
        self._due = 0.0

    def __getitem__(self, name: str) -> Run:
        return self._runs[name].run

    def look(self) -> None:
        """Look which runs are there, and which have changed. Raise OSError if the storage cannot be read."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _LOOK_S
        is_run = (self.storage / names.MANIFEST).exists()
        folders = [""] if is_run else folders_in(self.storage)
        found = {name or self.storage.name: str(self.storage / name) for name in folders}
        jobs = {job.name: job for job in self._jobs(found.values()) if job.name not in found}
        for name in self._runs.keys() - found.keys() - jobs.keys():
            del self._runs[name]
        for name, job in jobs.items():
            one = self._runs.setdefault(name, WatchedRun(job.path))
            if one.run != job:
                one.run, one.version = job, self.version + 1
                self.version = one.version
        for name, path in found.items():
            one = self._runs.get(name) or self._runs.setdefault(name, WatchedRun(path))
            if one.look():
                one.version = self.version = self.version + 1

    def read(self, seconds: float) -> bool:
        """Read for so long what was added to files, short ones first. Return whether some of it is left."""
        until = time.monotonic() + seconds
        for one in sorted((one for one in self._runs.values() if one.unread), key=lambda one: one.unread):
            while one.unread and time.monotonic() < until:
                one.read()
            one.version = self.version = self.version + 1
            if one.unread:
                return True
        return False

    def data(
        self, since: int, metrics: Sequence[str], detailed: Collection[str] = (), points: int = MOST_POINTS
    ) -> dict[str, Any]:
        """Return the names of all runs, and the rows that have changed since a version or are wanted in detail.

        metrics: see :meth:`WatchedRun.row`.
        detailed: runs that come with curves of about so many points; the others have a small one of the first metric.
        """
        shown = {name: one for name, one in self._runs.items() if one.run.state != FOREIGN}
        rows = [
            one.row(metrics, points) if name in detailed else one.row(metrics[:1], SPARKLINE)
            for name, one in shown.items()
            if one.version > since or name in detailed
        ]
        return {"version": self.version, "now": time.time(), "runs": list(shown), "rows": rows}


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _plain(values: object) -> dict[str, float | str]:
    """Return the first of nested metrics or settings: numbers, and everything else, also NaN, as text."""
    listed = list(flatten(values).items())[:_MOST_METRICS] if isinstance(values, dict) else []
    return {str(name): value if _is_number(value) else str(value)[:_LONGEST] for name, value in listed}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300

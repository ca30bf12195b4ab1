"""The runs of a storage path as rows of a table, kept up to date from their files. Runs in: the process of the board.

A file of lines is read once, and then only what has been added to it. Nobody waits for that: long files are read a
little at a time (:meth:`Board.read`), and a row says how much of them is still unread.
"""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distrain.hosts.memory import MemoryHistory
from distrain.page.reports import DAMAGE, Reports
from distrain.storage import names
from distrain.storage.lines import MOST_OF_LINES, Tail, event_in, may_be_of, read_with, record_in
from distrain.storage.runs.listing import FINISHED, FOREIGN, RUNNING, STARTING, Run, run_at
from distrain.system.process import below, process_table
from distrain.system.text import flatten, size

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_LOOK_S, _MEMORY_S = 0.8, 5.0
"""Seconds between two looks at all runs, and at the memory of one. They may be asked for more often."""
_CHUNK, _LONGEST_LINE = 64 << 10, 1 << 20
"""Bytes that are read at once, and of the longest line: nobody waits long for one."""
_BINS = 256
"""Of a curve in memory. There may be thousands of curves."""
SPARKLINE = 40
"""Points of the small curves in the table."""
_SAMPLES = 20
"""Reports over which the rate is measured."""
_MOST_METRICS, _LONGEST, _MOST_HOSTS = 30, 300, 8


class GrowingFile:
    """A file of lines that grows. ``unread``: bytes that were there at the last look, and are not read yet.

    left_out: a sentence about what is not read: the beginning of a very long file, and lines that are too long.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._name = os.path.basename(path)
        self._tail = Tail(longest=_LONGEST_LINE)
        self.unread = 0
        self.left_out = ""

    def look(self) -> bool:
        """Look how much there is to read. Return False if the file has lost lines that were read."""
        tail, found = self._tail, (_stamp(self._path) or (0, 0))[1]
        if not tail.position and found > MOST_OF_LINES:
            tail.position, tail.is_in_line = found - MOST_OF_LINES, True
            self.left_out = f"only the last {size(MOST_OF_LINES)} of {self._name} are shown"
        self.unread = max(0, found - tail.position)
        return found >= tail.position

    def lines(self) -> list[bytes]:
        """Return some of the next whole lines; none if there is only one that is still being written, or too long."""
        before, parts = self._tail.position, []
        with suppress(OSError):  # it has been deleted
            parts = read_with(self._path, lambda file: list(self._tail.read(file, _CHUNK)))
        if any(begins and not part.endswith(b"\n") for part, begins in parts) and not self.left_out:
            self.left_out = f"lines of {self._name} longer than {size(_LONGEST_LINE)} are not shown"
        done = self._tail.position - before
        self.unread = max(0, self.unread - done) if done else 0
        return [part for part, begins in parts if begins and part.endswith(b"\n")]


class WatchedRun:
    """A run at the last look, and what was read of its files. ``version``: of the board at its last change."""

    def __init__(self, path: str) -> None:
        self.run = Run(os.path.basename(path), path, FOREIGN)
        self.version = 0
        self._stamp: tuple[int, int, int] | None = None
        self._memory, self._memory_bytes, self._memory_due = MemoryHistory(), 0, 0.0
        self._made: tuple[object, dict[str, Any]] = None, {}
        self._begin()

    def _begin(self) -> None:
        self._metrics, self._events = (GrowingFile(f"{self.run.path}/{name}") for name in (names.METRICS, names.EVENTS))
        self._reports = Reports([], _BINS)
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._last = self.run.last_report(_LONGEST_LINE) or {}  # long files take a while
        self._troubles: dict[object, str] = {}
        """The troubles of this moment: a hang, or those of the memory or a GPU of a rank."""
        self._last_hang = 0.0, ""
        """The time at which it was over, and its text."""

    @property
    def unread(self) -> int:
        """Bytes of the files that are not read yet."""
        return self._metrics.unread + self._events.unread

    def look(self) -> bool:
        """Look if the run has changed; return whether its row has. What was added to its files is not read yet."""
        before, stamp = self.run, _stamp(f"{self.run.path}/{names.MANIFEST}")
        if stamp == self._stamp and before.state not in (RUNNING, STARTING, FOREIGN):
            return False
        self._stamp, self.run = stamp, run_at(before.path)
        if self.run.manifest.get("run_id") != before.manifest.get("run_id"):
            self._begin()
        if not all([self._metrics.look(), self._events.look()]):
            self._begin()
            self._metrics.look()
            self._events.look()
        self._reports.set_attempts(self.run.attempts)
        return self._looked_at_memory() or self.run != before

    def _looked_at_memory(self) -> bool:
        """Return whether the memory of the run's processes on this machine was measured anew."""
        pid, is_here = self.run.manifest.get("pid"), self.run.manifest.get("host") == platform.node()
        if self.run.state != RUNNING or not is_here or not isinstance(pid, int) or time.monotonic() < self._memory_due:
            return False
        self._memory_due = time.monotonic() + _MEMORY_S
        sessions = {entry.pid: entry.pid for entry in below(process_table(), [pid])}
        self._memory_bytes = sum(self._memory.look(sessions).values())
        return True

    def read(self) -> None:
        """Read the next lines of a file."""
        if self._events.unread:
            for line in self._events.lines():
                self._add_event(event_in(line))
        else:
            likely = (line for line in self._metrics.lines() if may_be_of(0, line))
            for record in (record_in(line, names.METRICS) for line in likely):
                if record is not None and record["rank"] == 0:
                    self._add_report(record)

    def _add_event(self, event: dict[str, Any] | None) -> None:
        match event:
            case {"event": "hang_began", "text": text}:
                self._troubles["hang"] = str(text)
            case {"event": "hang", "time": float(at), "text": text}:
                self._troubles.pop("hang", None)
                self._last_hang = at, str(text)
            case {"event": "trouble", "host": host, "rank": rank, "problem": problem, "text": text}:
                self._troubles[str((host, rank, problem))] = f"rank {rank} on {host}: {text}"
            case {"event": "trouble_over", "host": host, "rank": rank, "problem": problem}:
                self._troubles.pop(str((host, rank, problem)), None)

    def _add_report(self, record: dict[str, Any]) -> None:
        try:
            if record["attempt"] not in self._reports.attempts:
                self._samples.clear()
            self._reports.add(record)
            done = record["progress"][0] if "progress" in record else record["index"]
            self._samples.append((float(record["time"]), float(done)))
            if self._last.get("time", 0.0) <= record["time"]:
                self._last = self._reports.last or {}
        except DAMAGE:
            return

    def row(self, metric: str | None, most: int = SPARKLINE) -> dict[str, Any]:
        """Return the row, with the curve of a metric; ``""``: of the loss, or the first one; None: of each metric."""
        names_of_curves = self._chosen(metric)
        key = self.version, names_of_curves, most
        if self._made[0] != key:
            self._made = key, self._make_row(names_of_curves, most)
        return self._made[1]

    def _chosen(self, metric: str | None) -> list[str]:
        found = self._reports.curves
        wanted = metric or ("loss" if "loss" in found else next(iter(found), ""))
        return list(found) if metric is None else [name for name in [wanted] if name in found]

    def _make_row(self, metrics: Iterable[str], most: int) -> dict[str, Any]:
        run, last = self.run, self._last
        rate, interval = self._pace()
        return {
            "name": run.name,
            "state": run.state,
            "began": run.began,
            "ended": run.until(last or None),
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
            "metrics": _plain(last.get("metrics")),
            "settings": _plain(run.manifest.get("train_loop_config")),
            "note": self._note()[:_LONGEST],
            "memory": self._memory_bytes if run.state == RUNNING else 0,
            "unread": self._metrics.unread,
            "curves": {name: self.curve(name, most) for name in metrics},
        }

    def curve(self, metric: str, most: int) -> dict[str, Any] | None:
        """Return a curve with its lowest, highest and last point, each as step and value."""
        if (found := self._reports.curves.get(metric)) is None:
            return None
        points = found.points(most)
        steps, values = [step for step, _ in points], [float(f"{value:.6g}") for _, value in points]
        return {"x": steps, "y": values, "low": found.lowest, "high": found.highest, "last": found.last}

    def _pace(self) -> tuple[float | None, float]:
        """Return the steps of the progress, or the reports, per second, and the seconds between two reports."""
        if len(self._samples) < 2:
            return None, 0.0
        (first, done), (last, more) = self._samples[0], self._samples[-1]
        interval = (last - first) / (len(self._samples) - 1)
        return (more - done) / (last - first) if more > done and last > first else None, interval

    def _note(self) -> str:
        """Return what is wrong, or why the run has ended, and what was wrong then."""
        left_out = list(filter(None, (self._metrics.left_out, self._events.left_out)))
        if self.run.is_active:
            return "; ".join([*self._troubles.values(), *left_out])
        if self.run.state == FINISHED:
            return "; ".join(left_out)
        ends = [str(one["failure"])[:_LONGEST] for one in self.run.attempts_now if one.get("failure")]
        over, hang = self._last_hang
        hung = [hang] if over > self._last.get("time", 0.0) else []  # it ended with the run
        return self.run.problem or "; ".join([*ends[-1:], *hung, *left_out])


class Board:
    """The runs in a local storage path. ``version`` grows with each change that a row shows."""

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        self.version = 0
        self._runs: dict[str, WatchedRun] = {}
        self._behind: set[WatchedRun] = set()
        """Runs with something to read."""
        self._removed = 0
        """The version at which a run was last deleted."""
        self._metric: str | None = ""
        """The metric that was asked for last."""
        self._due = 0.0

    def __getitem__(self, name: str) -> Run:
        return self._runs[name].run

    def look(self) -> None:
        """Look which runs are there, and which have changed. Raise OSError if the storage cannot be read."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _LOOK_S
        found = self._paths()
        for name in self._runs.keys() - found.keys():
            self._behind.discard(self._runs.pop(name))
            self._removed = self.version = self.version + 1
        for name, path in found.items():
            one = self._runs.get(name) or self._runs.setdefault(name, WatchedRun(path))
            if one.look():
                one.version = self.version = self.version + 1
            if one.unread:
                self._behind.add(one)

    def _paths(self) -> dict[str, str]:
        if (self.storage / names.MANIFEST).exists():
            return {self.storage.name: str(self.storage)}
        with os.scandir(self.storage) as entries:
            return {one.name: one.path for one in entries if not one.name.startswith(".") and one.is_dir()}

    def read(self, seconds: float) -> bool:
        """Read for so long what was added to files, short ones first. Return whether some of it is left."""
        until = time.monotonic() + seconds
        for one in sorted(self._behind, key=lambda one: one.unread):
            while one.unread and time.monotonic() < until:
                one.read()
            one.version = self.version = self.version + 1
            if one.unread:
                return True
            self._behind.remove(one)
            one.row(self._metric)  # now, lest somebody waits for those of a thousand runs
        return False

    def data(self, since: int, metric: str | None, most: int = SPARKLINE) -> dict[str, Any]:
        """Return the rows that have changed since a version; all (``whole``) if a run was deleted since."""
        self._metric = metric
        whole = since == 0 or since < self._removed
        shown = [one for one in self._runs.values() if one.run.state != FOREIGN and (whole or one.version > since)]
        rows = [one.row(metric, most) for one in shown]
        return {"version": self.version, "whole": whole, "now": time.time(), "rows": rows}

    def curves(self, runs: Iterable[str], metric: str, most: int) -> dict[str, Any]:
        """Return the curve of a metric for each of these runs that has it."""
        found = {name: self._runs[name].curve(metric, most) for name in runs if name in self._runs}
        return {name: curve for name, curve in found.items() if curve}


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

"""The runs of a storage path as rows of a table, kept up to date from their files. Runs in: the process of the board.

A file of lines is read once, and then only what has been added to it. Nobody waits for that: long files are read a
little at a time (:meth:`Board.read`), and a row says how much of them is still unread.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from distrain.hosts.memory import MemoryHistory
from distrain.page.reports import Reports
from distrain.storage import names
from distrain.storage.lines import event_in, record_in
from distrain.storage.runs.listing import FOREIGN, KILLED, RUNNING, STARTING, Run, local_run
from distrain.system.text import flatten, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from distrain.page.envelope import Envelope

_LOOK_S, _MEMORY_S = 0.8, 5.0
"""Seconds between two looks at all runs, and at the memory of one: they may be asked for more often."""
_CHUNK = 64 << 10
_RANK_0 = b'"rank":0'
_BINS = 256
"""Of a curve in memory; a thousand runs may have some each."""
SPARKLINE = 40
"""Points of the small curves in the table."""
_SAMPLES = 20
"""Reports over which the rate is measured."""
_MOST_METRICS, _LONGEST, _MOST_HOSTS = 30, 300, 8


class Tail:
    """A file of lines that grows. ``unread``: bytes that were there at the last look."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.read_to, self.size = 0, 0

    @property
    def unread(self) -> int:
        return self.size - self.read_to

    def look(self) -> None:
        try:
            self.size = max(os.stat(self._path).st_size, self.read_to)
        except OSError:  # it is missing, or the run is being deleted
            self.size = self.read_to

    def lines(self) -> list[bytes]:
        """Return the next whole lines; none at a last line that is still being written."""
        most = _CHUNK
        with open(self._path, "rb", buffering=0) as file:
            while True:
                file.seek(self.read_to)
                data = file.read(most)
                end = data.rfind(b"\n") + 1
                if end or len(data) < most:
                    break
                most *= 2  # a long line
        self.read_to += end
        if not end:
            self.size = self.read_to
        return data[:end].splitlines()


class WatchedRun:
    """A run as it was at the last look, and what was read of its files. ``version``: of the board at its last change."""

    def __init__(self, path: str) -> None:
        self.run = Run(os.path.basename(path), path, FOREIGN)
        self.version = 0
        self._stamp: tuple[int, ...] | None = None
        self._memory, self._memory_bytes, self._memory_at = MemoryHistory(), 0, 0.0
        self._begin()

    def _begin(self) -> None:
        path = self.run.path
        self._metrics, self._events = Tail(f"{path}/{names.METRICS}"), Tail(f"{path}/{names.EVENTS}")
        self._reports = Reports((), _BINS)
        self._last: dict[str, Any] | None = None
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._hang, self._troubles = "", {}

    @property
    def unread(self) -> int:
        """Bytes of the files that are not read yet."""
        return self._metrics.unread + self._events.unread

    def look(self) -> bool:
        """Look if the run has changed; return whether its row has. What was added to its files is not read yet."""
        before, stamp = self.run, _stamp(f"{self.run.path}/{names.MANIFEST}")
        if stamp == self._stamp and before.state not in (RUNNING, STARTING, FOREIGN):
            return False
        self._stamp, self.run = stamp, local_run(before.path)
        if self.run.manifest.get("run_id") != before.manifest.get("run_id"):  # another run of the same name
            self._begin()
            self._last = self.run.last_report()  # long files take a while
        self._reports.known = [(one["attempt"], one.get("first_step"), True) for one in self.run.attempts]
        self._metrics.look()
        if self.run.state == RUNNING:
            self._events.look()
        return self.run != before or self._looked_at_memory()

    def read(self) -> None:
        """Read the next lines of a file."""
        try:
            if self._events.unread:
                for line in self._events.lines():
                    self._add_event(line)
                return
            for line in self._metrics.lines():
                if _RANK_0 in line and (record := record_in(line, names.METRICS)) and record["rank"] == 0:
                    self._add_report(record)
        except OSError:  # it is being deleted
            self._metrics.look()
            self._events.size = self._events.read_to

    def _add_event(self, line: bytes) -> None:
        match event_in(line):
            case {"event": "hang_began", "text": str(text)}:
                self._hang = text
            case {"event": "hang"}:
                self._hang = ""
            case {"event": "trouble", "host": host, "rank": rank, "problem": problem, "text": str(text)}:
                self._troubles[host, rank, problem] = f"rank {rank} on {host}: {text}"
            case {"event": "trouble_over", "host": host, "rank": rank, "problem": problem}:
                self._troubles.pop((host, rank, problem), None)

    def _add_report(self, record: dict[str, Any]) -> None:
        try:
            if record["attempt"] not in self._reports.attempts:
                self._samples.clear()
            self._reports.add(record)
            done = record.get("progress", [self._reports.last["step"]])[0] if self._reports.last else 0
            self._samples.append((record["time"], float(done)))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):  # damaged
            return
        if self._last is None or self._last["time"] <= record["time"]:
            self._last = record

    def _looked_at_memory(self) -> bool:
        """Return whether the memory of the run's processes on this machine was measured anew."""
        pid, now = self.run.manifest.get("pid"), time.monotonic()
        is_here = self.run.state == RUNNING and self.run.manifest.get("host") == platform.node()
        if not is_here or not isinstance(pid, int) or now < self._memory_at:
            return False
        self._memory_at = now + _MEMORY_S
        sessions = _sessions_below(pid)
        self._memory_bytes = sum(self._memory.look({one: one for one in sessions}).values())
        return True

    def row(self, metrics: Iterable[str] | None, most: int = SPARKLINE) -> dict[str, Any]:
        """Return the row, with the curves of these metrics, or (None) of all."""
        run, last = self.run, self._last or {}
        progress, rate = last.get("progress"), self._rate()
        is_killed = run.state == KILLED
        return {
            "name": run.name,
            "state": run.state,
            "began": run.began,
            "ended": last.get("time", run.ended) if is_killed else run.ended,
            "script": run.script[:_LONGEST],
            "attempts": len(run.attempts_now),
            "hosts": list(run.hosts)[:_MOST_HOSTS],
            "more_hosts": max(0, len(run.hosts) - _MOST_HOSTS),
            "ranks": run.ranks,
            "step": run.step_of(last) if last else None,
            "reported": last.get("time"),
            "progress": progress if _is_progress(progress) else None,
            "rate": rate,
            "metrics": _plain(last.get("metrics")),
            "settings": _plain(run.manifest.get("train_loop_config")),
            "note": self._note(),
            "memory": self._memory_bytes if run.state == RUNNING else 0,
            "unread": round(self._metrics.unread / max(1, self._metrics.size), 3),
            "curves": self.curves(metrics, most),
        }

    def curves(self, metrics: Iterable[str] | None, most: int) -> dict[str, Any]:
        """Return the curves of these metrics that the run has, or (None) of all, each of about so many points."""
        found = self._reports.curves
        return {name: _curve(found[name], most) for name in (found if metrics is None else metrics) if name in found}

    def numbers(self) -> list[str]:
        """Return the names of the metrics that are numbers."""
        return [name for name, value in _plain((self._last or {}).get("metrics")).items() if not isinstance(value, str)]

    def _rate(self) -> float | None:
        """Return the steps of the progress per second, or the reports per second."""
        if len(self._samples) < 2:
            return None
        (first, done), (last, more) = self._samples[0], self._samples[-1]
        return (more - done) / (last - first) if more > done and last > first else None

    def _note(self) -> str:
        """Return what is wrong, or why the run has failed."""
        if self.run.state in (RUNNING, STARTING):
            return printable("; ".join([*filter(None, [self._hang]), *self._troubles.values()]))[:_LONGEST]
        ends = [str(one["failure"]) for one in self.run.attempts_now if one.get("failure")]
        return printable(self.run.problem or (ends[-1] if ends else ""))[:_LONGEST]


class Board:
    """The runs in a local storage path. ``version`` grows with each change that a row shows."""

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        self.version = 0
        self._runs: dict[str, WatchedRun] = {}
        self._removed = 0
        """The version at which a run was last deleted."""
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
            del self._runs[name]
            self._removed = self.version = self.version + 1
        for name, path in found.items():
            one = self._runs.get(name) or self._runs.setdefault(name, WatchedRun(path))
            if one.look():
                one.version = self.version = self.version + 1

    def _paths(self) -> dict[str, str]:
        if (self.storage / names.MANIFEST).exists():
            return {self.storage.name: str(self.storage)}
        try:
            with os.scandir(self.storage) as entries:
                return {one.name: one.path for one in entries if not one.name.startswith(".") and one.is_dir()}
        except FileNotFoundError:
            if self._runs:  # a file system that is away for a while
                raise
            return {}  # the first run will make it

    def read(self, seconds: float) -> bool:
        """Read for so long what was added to files, short ones first. Return whether some of it is left."""
        until = time.monotonic() + seconds
        for one in sorted((one for one in self._runs.values() if one.unread), key=lambda one: one.unread):
            self.version += 1
            one.version = self.version
            while one.unread:
                one.read()
                if time.monotonic() > until:
                    return True
        return False

    def data(self, since: int = 0, metrics: Sequence[str] | None = None, most: int = SPARKLINE) -> dict[str, Any]:
        """Return the rows that have changed since a version; all (``whole``) if a run was deleted since."""
        whole = since == 0 or since < self._removed
        shown = [one for one in self._runs.values() if one.run.state != FOREIGN and (whole or one.version > since)]
        rows = [one.row(metrics, most) for one in shown]
        return {"version": self.version, "whole": whole, "now": time.time(), "rows": rows}

    def curves(self, runs: Iterable[str], metric: str, most: int) -> dict[str, Any]:
        """Return the curve of a metric for each of these runs that has it."""
        found = {name: self._runs[name].curves([metric], most) for name in runs if name in self._runs}
        return {name: curves[metric] for name, curves in found.items() if curves}

    def metric(self) -> str:
        """Return the metric to show at first: the loss, or the first one of the newest run."""
        runs = sorted(self._runs.values(), key=lambda one: one.run.began, reverse=True)
        known = [name for one in runs for name in one.numbers()]
        return "loss" if "loss" in known else known[0] if known else ""


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _curve(found: Envelope, most: int) -> dict[str, Any]:
    points = found.points(most)
    return {
        "x": [step for step, _ in points],
        "y": [float(f"{value:.6g}") for _, value in points],
        "low": found.lowest,
        "high": found.highest,
    }


def _plain(values: object) -> dict[str, float | str]:
    """Return the first of nested metrics or settings: finite numbers, and everything else as text."""
    listed = list(flatten(values).items())[:_MOST_METRICS] if isinstance(values, dict) else []
    return {printable(name): value if _is_number(value) else printable(str(value))[:_LONGEST] for name, value in listed}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _is_progress(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)) and value[1] > 0


def _sessions_below(pid: int) -> set[int]:
    """Return the sessions of all processes that a process has started, and theirs, without its own session."""
    found = {}
    for one in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{one}/stat") as file:
            _, parent, _, session, *_ = file.read().rpartition(")")[2].split()
            found[int(one)] = int(parent), int(session)
    below, more = {pid}, {pid}
    while more:
        more = {one for one, (parent, _) in found.items() if parent in more}
        below |= more
    return {session for one, (_, session) in found.items() if one in below} - {found.get(pid, (0, 0))[1]}

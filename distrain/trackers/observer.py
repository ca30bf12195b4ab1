"""The trackers of a run as observers. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from typing import TYPE_CHECKING

from distrain.api.observer import AttemptBegan, Committed, Ended, Fact, Observer, Reported, RunBegan
from distrain.api.tracker import Tracker, name_of, trackers_of
from distrain.system.log import say, warn

if TYPE_CHECKING:
    from distrain.api.config import RunContext
    from distrain.decisions.run_status import RunStatus
    from distrain.trackers.logging import TrackerLog

_RETRY_S = 60.0
"""Seconds after which a tracker that has failed is tried again."""
_START_S = 20.0
_starting = threading.Lock()
"""Held by a tracker that starts, for so long at most: imports of several at once have imported NumPy twice."""


def observers(context: RunContext, run: RunBegan, status: RunStatus) -> list[TrackerObserver]:
    """Return an observer for each tracker of a run."""
    return [TrackerObserver(tracker, run, status) for tracker in trackers_of(context.run_config.trackers, {})]


class TrackerObserver(Observer):
    """One tracker. If it fails, it is tried again later, and once more at the end of the run.

    What it has missed by then comes from the files of the run.
    """

    hears = (RunBegan, AttemptBegan, Reported, Committed, Ended)

    def __init__(self, tracker: Tracker, run: RunBegan, status: RunStatus) -> None:
        self.name = f"the tracker {name_of(tracker)}"
        self.advice = "metrics.jsonl has all reports"
        self._tracker = tracker
        self._run = run
        self._status = status
        self._log: TrackerLog | None = None
        self._next_try = 0.0
        self._attempt = 0
        self._has_started = self._has_warned = False
        """True once the user knows of a failure: the tracker fails again and again if its server is down."""

    def hear(self, fact: Fact) -> None:
        if isinstance(fact, AttemptBegan):
            self._attempt = fact.attempt
        if self._log is not None or isinstance(fact, (RunBegan, Ended)):
            self._try(fact)

    def idle(self) -> None:
        if self._log is not None or time.monotonic() >= self._next_try:
            self._try(None)

    def _try(self, fact: Fact | None) -> None:
        try:
            self._act(self._log or self._start(), fact)
        except BaseException as error:  # SystemExit, too
            self._log, self._next_try = None, time.monotonic() + _RETRY_S
            if isinstance(fact, Ended):
                what = "may lack reports" if self._has_started else "has logged nothing"
                warn(f"{self.name} {what}: {type(error).__name__}: {error}; {self.advice}")
            elif not self._has_warned:
                said = f"{self.name} failed: {type(error).__name__}: {error}; the run continues; {self.advice}"
                warn(f"{said}\n{traceback.format_exc().rstrip()}")
            self._has_warned = True

    def _start(self) -> TrackerLog:
        from distrain.trackers.logging import TrackerLog  # in this thread, as it takes a while

        log = TrackerLog(self._tracker, self._run.directory, self._run.location)
        with contextlib.ExitStack() as stack:
            if _starting.acquire(timeout=_START_S):
                stack.callback(_starting.release)
            url = log.start()
        if url:
            say(f"{name_of(self._tracker)}: {url}")
        self._log, self._has_started = log, True
        return log

    def _act(self, log: TrackerLog, fact: Fact | None) -> None:
        match fact:
            case Reported(rank=0):
                moment = time.time() - (time.monotonic() - fact.now)
                known = {"time": moment, "attempt": self._attempt, "metrics": fact.metrics, "progress": fact.progress}
                log.report({"step": fact.number, **known})
            case Committed():
                log.checkpoint(fact.checkpoint, fact.step)
            case Ended():
                if self._status.reports > log.highest:  # the last ones were left out
                    log.catch_up()
                log.finish(fact.status)
            case None:
                log.flush()

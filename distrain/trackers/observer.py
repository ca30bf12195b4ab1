"""The trackers of a run as observers: each logs what is new in the run directory. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.api.observer import Ended, Observer, RunBegan
from distrain.api.tracker import TRACKERS, name_of, trackers_of
from distrain.storage.ownership import open_without_links
from distrain.storage.paths import RunPaths
from distrain.system.log import say, warn
from distrain.trackers.follower import Follower

if TYPE_CHECKING:
    from distrain.api.config import RunContext
    from distrain.api.observer import Fact
    from distrain.api.tracker import Tracker
    from distrain.decisions.run_status import RunStatus

_RETRY_S = 60.0
"""Seconds after which a tracker that has failed is tried again."""


def observers(context: RunContext, run: RunBegan, status: RunStatus) -> list[TrackerObserver]:
    """Return an observer for each tracker of a run."""
    return [TrackerObserver(tracker, run, context) for tracker in trackers_of(context.run_config.trackers, {})]


class TrackerObserver(Observer):
    """One tracker. If it fails, it is tried again later, and once more at the end of the run.

    It follows the files of the run: so it neither loses nor repeats a report, however slow it is, and whoever dies.
    """

    hears = (RunBegan, Ended)

    def __init__(self, tracker: Tracker, run: RunBegan, context: RunContext) -> None:
        self.name = f"the tracker {name_of(tracker)}"
        self.advice = "the next start of this run, or distrain.trackers.export(), adds what is missing"
        if name_of(tracker) in TRACKERS:
            self.advice = f"`distrain export {run.location} --to {name_of(tracker)}` adds what is missing later"
        log_dir = context.run_config.log_dir
        self._tracker = tracker
        self._run = run
        self._paths = RunPaths(run.directory)
        self._log_file = self._paths.tracker_log(None if log_dir is None else Path(log_dir).expanduser())
        self._filesystem = context.run_config.storage_filesystem
        self._follower: Follower | None = None
        self._next_try = 0.0
        self._told: set[str] = set()

    def hear(self, fact: Fact) -> None:
        self._log(fact.status if isinstance(fact, Ended) else None)

    def idle(self) -> None:
        if time.monotonic() >= self._next_try:
            self._log(None)

    def _log(self, status: str | None) -> None:
        """Log what is new, and how the run has ended if it has."""
        try:
            if self._follower is None:
                self._follower = Follower(self._tracker, self._paths, self._run.location, self._filesystem)
                self._follower.start()
                if self._follower.url:
                    self._say_once(f"{name_of(self._tracker)}: {self._follower.url}")
            while self._follower.advance(is_over=status is not None):
                pass
            if status is not None:
                self._follower.finish(status)
        except BaseException as error:  # SystemExit, too
            self._follower, self._next_try = None, time.monotonic() + _RETRY_S
            self._warn_once(f"{self.name} failed: {type(error).__name__}: {error}; the run goes on, {self.advice}")

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            say(text)

    def _warn_once(self, text: str) -> None:
        """Tell the user once: a tracker fails again and again if its server is down."""
        if "problem" not in self._told:
            self._told.add("problem")
            warn(text)
        with contextlib.suppress(OSError):
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log_file, "a", opener=open_without_links) as file:
                traceback.print_exc(file=file)

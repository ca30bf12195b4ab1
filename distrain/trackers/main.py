"""The process that logs a run to its trackers, while the run trains. Runs in: tracker.

It only reads the files of the run. Each tracker has a thread, so that none waits for another. The process ends when the
coordinator asks for it and everything is logged, or some seconds after the coordinator has died.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from distrain import wire
from distrain.storage.paths import RunPaths
from distrain.system import process
from distrain.system.remote_path import decode_filesystem
from distrain.trackers.follower import Follower, locked
from distrain.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.api.tracker import Tracker

_PAUSE_S = 1.0
"""Seconds between two looks at the files."""
_RETRY_S = 60.0
"""Seconds after which a tracker that has failed is tried again."""
_ORPHAN_S = 3.0
"""Seconds that the trackers have after the coordinator has died."""
_LOOK_S = 0.2
_NICENESS = 19
_DIED = "failed"
"""Status of a run whose coordinator has died."""


def main(arguments: list[str]) -> None:
    """Follow a run. ``arguments``: the pid of the coordinator."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the end of the run has to be logged, too
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    process.adopt_orphans()
    channel = Channel(*process.private_stdio())
    try:
        messages = [frame.message() for frame in channel.wait()]
        if messages:
            order = messages[0]
            assert isinstance(order, wire.FollowRun)
            ending = _Ending()
            for message in messages[1:]:  # the run was short
                ending.note(message)
            _follow(order, ending, channel, int(arguments[0]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        process.kill_descendants()
        os._exit(0)  # threads of libraries, and a tracker that hangs, would keep the process


def _follow(order: wire.FollowRun, ending: _Ending, channel: Channel, coordinator: int) -> None:
    sys.path[:] = order.sys_path
    paths = RunPaths(Path(order.directory))
    with locked(paths):
        threads = [
            threading.Thread(target=_Logging(name, blob, order, paths, ending, channel.send).run, daemon=True)
            for name, blob in pickle.loads(order.body).items()  # noqa: S301 - made by the coordinator of this run
        ]
        for thread in threads:
            thread.start()
        deadline = None
        while any(thread.is_alive() for thread in threads):
            for frame in channel.wait(_LOOK_S):
                ending.note(frame.message())
            if ending.is_urgent:
                break
            if deadline is None and (channel.at_end or os.getppid() != coordinator):
                deadline = time.monotonic() + _ORPHAN_S
                ending.begin(_DIED)
            if deadline is not None:
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOOK_S)  # at its end, the channel does not wait


class _Ending:
    """The end of the run: its status, once it is there."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self.status = ""
        self.is_urgent = False
        """True if nobody waits any longer."""

    def note(self, message: wire.Message) -> None:
        assert isinstance(message, wire.EndTracking)
        self.is_urgent = self.has_begun
        self.begin(message.status)

    def begin(self, status: str) -> None:
        if not self._begun.is_set():
            self.status = status
            self._begun.set()

    @property
    def has_begun(self) -> bool:
        return self._begun.is_set()

    def wait(self, timeout_s: float) -> None:
        self._begun.wait(timeout_s)


class _Logging:
    """One tracker in its thread. If it fails, it is tried again later, and once more at the end of the run."""

    def __init__(
        self,
        name: str,
        blob: bytes,
        order: wire.FollowRun,
        paths: RunPaths,
        ending: _Ending,
        send: Callable[[wire.Message], None],
    ) -> None:
        self._name = name
        self._blob = blob
        self._order = order
        self._paths = paths
        self._ending = ending
        self._send = send
        self._told: set[str] = set()

    def run(self) -> None:
        while not self._log():
            if self._ending.has_begun:
                return
            self._ending.wait(_RETRY_S)

    def _log(self) -> bool:
        """Log until the run has ended and everything is logged. Return False if the tracker fails before."""
        try:
            tracker: Tracker = pickle.loads(self._blob)  # noqa: S301 - made by the coordinator of this run
            filesystem = decode_filesystem(self._order.filesystem)
            follower = Follower(tracker, self._paths, self._order.location, filesystem)
            follower.start()
            if follower.url:
                self._tell(follower.url)
            while True:
                is_over = self._ending.has_begun  # before it looks, as the last lines are written before the end
                if not follower.advance(is_over=is_over):
                    if is_over:
                        break
                    self._ending.wait(_PAUSE_S)
            follower.finish(self._ending.status)
        except BaseException as error:  # SystemExit, too
            traceback.print_exc()
            self._tell(f"{type(error).__name__}: {error}", is_problem=True)
            return False
        self._tell("", is_done=True)
        return True

    def _tell(self, text: str, *, is_problem: bool = False, is_done: bool = False) -> None:
        """Tell the user once: a tracker fails again and again if its server is down."""
        key = "problem" if is_problem else text
        if key not in self._told:
            self._told.add(key)
            try:
                self._send(wire.TrackerNotice(name=self._name, text=text, is_problem=is_problem, is_done=is_done))
            except OSError:  # the coordinator has died
                return

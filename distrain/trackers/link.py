"""The coordinator's end of the process that logs a run to its trackers. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import threading
import time
from typing import TYPE_CHECKING

from distrain import wire
from distrain.storage.ownership import open_without_links
from distrain.system import process
from distrain.system.log import say, warn
from distrain.trackers.choice import KINDS
from distrain.wire.child_link import ChildLink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from distrain.storage.paths import RunPaths

_NOTICE_AFTER_S = 5.0
"""Seconds of waiting after which the user is informed."""
_LONGEST_WAIT_S = 60.0
"""Seconds that a run waits for its trackers at its end."""
_WAIT_WHEN_STOPPED_S = 10.0
"""The limit for a run that was asked to stop: a scheduler kills it soon."""
_END_S = 1.0
"""Seconds that the process has to end when nobody waits for its trackers any longer."""
_LISTEN_S = 0.5


class TrackerLink:
    """The tracker process of one run. Whatever becomes of it, the run goes on.

    trackers: pickled, by name. location, filesystem: the run directory as users know it. log: the file for the output
    of the process. listens: show news at once, in a thread; else they are shown by :meth:`close`.
    """

    def __init__(
        self,
        trackers: Mapping[str, bytes],
        paths: RunPaths,
        *,
        location: str,
        filesystem: str,
        sys_path: Sequence[str],
        run_id: str,
        flags: Sequence[str],
        log: Path,
        listens: bool,
    ) -> None:
        self._location = location
        self._open = set(trackers)
        self._failed: set[str] = set()
        argv = process.bootstrap_argv("tracker", str(os.getpid()), flags=flags)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab", opener=open_without_links) as output:
            ids = {process.RUN_IDS: process.extended_run_ids(run_id)}
            self._child = ChildLink(argv, stderr=output.fileno(), environment=ids)
        self._send(
            wire.FollowRun(
                directory=str(paths.root),
                location=location,
                filesystem=filesystem,
                sys_path=list(sys_path),
                body=pickle.dumps(dict(trackers)),
            )
        )
        self._thread: threading.Thread | None = None
        if listens:
            self._thread = threading.Thread(target=self._listen, name="distrain-trackers", daemon=True)
            self._thread.start()

    def close(self, status: str) -> None:
        """Wait until everything is logged, but not for long. Ctrl-C ends the waiting.

        status: how the run has ended, as in run.json.
        """
        began = time.monotonic()
        longest_s = _WAIT_WHEN_STOPPED_S if status == "aborted" else _LONGEST_WAIT_S
        try:
            self._send(wire.EndTracking(status=status))
            if not self._wait(began + _NOTICE_AFTER_S):
                say(f"waiting for {self._named()} to log the rest; Ctrl-C ends the waiting")
                self._wait(began + longest_s)
        except KeyboardInterrupt:
            pass
        finally:
            self._end(status)
        if left := sorted(self._open - self._failed):
            have = "have" if len(left) > 1 else "has"
            warn(f"{self._named()} {have} not logged everything; {self._advice(left[0])}")

    def _send(self, message: wire.Message) -> None:
        with contextlib.suppress(OSError):  # the process has died, which is noticed at the end
            self._child.channel.send(message)

    def _wait(self, deadline: float) -> bool:
        """Wait for the end of the process. Return False after the deadline (time.monotonic)."""
        if self._thread is None:
            return self._listen(deadline)
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(left, _LISTEN_S))  # in short waits, which Ctrl-C can end on every system
        return not self._thread.is_alive()

    def _end(self, status: str) -> None:
        """Let the process end now, with the processes that its libraries have started; kill it if it does not."""
        self._send(wire.EndTracking(status=status))
        self._wait(time.monotonic() + _END_S)
        process.kill_groups([self._child.process.pid])
        if self._thread is not None:
            self._thread.join()
        self._child.kill()

    def _listen(self, deadline: float = math.inf) -> bool:
        """Show news until the process ends. Return False after the deadline."""
        channel = self._child.channel
        while not channel.at_end and time.monotonic() < deadline:
            for frame in channel.wait(_LISTEN_S):
                message = frame.message()
                assert isinstance(message, wire.TrackerNotice)
                self._show(message)
        return channel.at_end

    def _show(self, notice: wire.TrackerNotice) -> None:
        name = notice.name
        if notice.is_done:
            self._open.discard(name)
        elif notice.is_problem:
            self._failed.add(name)
            warn(f"the tracker {name} failed: {notice.text}; the run goes on, {self._advice(name)}")
        else:
            say(f"{name}: {notice.text}")

    def _named(self) -> str:
        left = sorted(self._open - self._failed)
        return f"the tracker{'s' * (len(left) > 1)} {' and '.join(left)}"

    def _advice(self, name: str) -> str:
        if name in KINDS:
            return f"`distrain export {self._location} --to {name}` adds what is missing later"
        return "the next start of this run, or distrain.trackers.export(), adds what is missing"

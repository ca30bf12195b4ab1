"""Samples of what train_func is doing: its own work, or waiting for other ranks. Runs in: worker.

A thread looks at the stack of the main thread some ten times per second. It tells the coordinator every 20 s how the
rank spends its time, and at once that it stands still.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.errors import DistrainError
from distrain.system.background import start_hidden_thread
from distrain.worker import flight_recorder
from distrain.worker.places import is_waiting, nap, no_collection, place_of
from distrain.worker.standstill import STANDING_S, Standstill
from distrain.worker.user_code import is_of_communication

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.worker.session import Session

_SAMPLE_S = 0.1
"""The mean time between two samples. It varies, as steps of that length would always be seen at the same point."""
_NAP_S = 0.01
"""At most so long is the last part of that time, after which Python code is seen as often as native code."""
_LAST_CALLS = 20
"""Collectives that a rank names when it has finished."""


class VitalsSampler:
    """A context in which samples of the main thread are taken and sent. Enter it there.

    every_s: seconds between two :class:`~distrain.wire.Vitals`. poll: handles messages before each sample, in this
    thread. Returns False if it cannot.
    """

    def __init__(self, session: Session, every_s: float, poll: Callable[[], bool] = lambda: True) -> None:
        self._session = session
        self._every_s = every_s
        self._poll = poll
        self._over = threading.Event()
        self._main = threading.get_ident()
        self._standstill = Standstill(threading.get_native_id())
        self._standstill.listen = poll
        self._address = os.environ.get("MASTER_ADDR")
        self._told = ("", "")
        """The state and the place that were sent last."""
        self._told_at = 0.0
        session.hooks["standstill"] = lambda _: self._tell_again()
        session.hooks["flight_recorder"] = lambda _: self.dump_recorder()

    def __enter__(self) -> None:
        start_hidden_thread(self._sample)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._over.set()
        with contextlib.suppress(OSError, DistrainError):
            if error is None or isinstance(error, SystemExit):  # others may wait for this rank now
                self.dump_recorder("last_collectives", most=_LAST_CALLS)
            elif is_of_communication(error):
                self.dump_recorder(has_failed=True)

    def _sample(self) -> None:
        """Take samples until the end of the context, or until the agent, or rank 0, is gone."""
        seen = began = time.monotonic()
        waiting_s = 0.0
        places: dict[str, float] = defaultdict(float)
        """By place: seconds of the rank's own work."""
        chance = random.Random()  # noqa: S311 - its own, so that the draws of train_func stay the same
        while not self._over.wait(chance.uniform(0.5, 1.5) * _SAMPLE_S):
            if not self._poll():  # a question may wait
                self._standstill.expect_stacks(seen)
                if not self._told[0] and seen >= self._told_at + STANDING_S:
                    self._told = ("?", "")
            nap(chance.uniform(0.0, _NAP_S))
            now = time.monotonic()
            if now - seen > STANDING_S:  # the process was stopped, or native code held the GIL: others may blame it
                self._told = ("?", "")
                self._standstill.begin((), now)
            with no_collection():
                frame = sys._current_frames()[self._main]
                if is_waiting(frame):
                    waiting_s += now - seen
                else:
                    places[place_of(frame)] += now - seen
                self._standstill.sample(frame, now)
                del frame  # it would keep alive what train_func has deleted
            seen = now
            stand = self._standstill
            if self._told != (told := (stand.state, stand.place)):
                self._told, self._told_at = told, now
                seconds = round(now - stand.since, 3)
                self._session.send(wire.Standstill, state=stand.state, place=stand.place, seconds=seconds)
                if stand.place.endswith("init_process_group") and self._address != (given := os.getenv("MASTER_ADDR")):
                    text = f"distrain: {stand.place}: no rank 0 answers at MASTER_ADDR={given}, which your code has set"
                    print(f"{text}; leave it to distrain, which had set {self._address}", file=sys.stderr)
                    self._address = given
            if now >= began + self._every_s:
                self._send(waiting_s, places)
                began, waiting_s = now, 0.0
                places.clear()

    def _tell_again(self) -> None:
        self._told = ("?", "")
        self._standstill.expect_stacks(time.monotonic())

    def _send(self, waiting_s: float, places: dict[str, float]) -> None:
        place, place_s = max(places.items(), key=itemgetter(1), default=("", 0.0))
        self._session.send(
            wire.Vitals,
            own_s=round(sum(places.values()), 3),
            waiting_s=round(waiting_s, 3),
            place=place,
            place_s=round(place_s, 3),
        )

    def dump_recorder(self, what: str = "flight_recorder", **which: Any) -> None:
        """Send what torch's flight recorder has. ``which``: see :func:`flight_recorder.dump`."""
        if body := flight_recorder.dump(**which):
            self._session.send(wire.Dump, what=what, body=body)

"""Samples of what train_func is doing: its own work, or waiting for other ranks. Runs in: worker.

A thread looks at the stack of the main thread some ten times per second, and tells the coordinator now and then.
"""

from __future__ import annotations

import _thread
import linecache
import os
import random
import re
import signal
import sys
import threading
import time
from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING

from distrain import wire
from distrain.errors import DistrainError
from distrain.system.text import LIBRARY_FILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from distrain.api.context import TrainContext
    from distrain.worker.session import WorkerChannel

_SAMPLE_S = 0.1
"""The mean time between two samples. It varies, as steps of that length would always be seen at the same point."""
_OWN_FILES = os.path.dirname(os.path.dirname(__file__)) + os.sep
_WAITING_FILES = re.compile(
    r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$|/distrain/wire/channel\.py$"
)
"""Files whose functions wait in native code for other ranks."""
_WAITING_FUNCTIONS = {"_engine_run_backward", "synchronize"}
"""Functions of torch: DDP waits for other ranks in backward(), and a GPU waits for them in its queue."""
_WAITING_CALL = re.compile(r"\.(wait|item|cpu|tolist|synchronize)\(\)")
"""Native methods of tensors and of asynchronous collectives that wait for the same. They have no frame of their own."""


class VitalsSampler:
    """A context in which samples of the main thread are taken and sent. Enter it there.

    every_s: seconds between two messages.
    """

    def __init__(self, channel: WorkerChannel, context: TrainContext, every_s: float) -> None:
        self._channel = channel
        self._context = context
        self._every_s = every_s
        self.poll: Callable[[], None] = lambda: None
        """Called before each sample, in the thread."""
        self._over = threading.Event()
        self._main = threading.get_ident()

    def __enter__(self) -> None:
        _thread.start_new_thread(self._run, ())  # unlike a threading.Thread, train_func does not count it as its own

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they have to interrupt the main thread
        seen = began = time.monotonic()
        own_s = waiting_s = 0.0
        places: dict[str, float] = defaultdict(float)
        chance = random.Random()  # noqa: S311 - its own, so that the draws of train_func stay the same
        while not self._over.wait(chance.uniform(0.5, 1.5) * _SAMPLE_S):
            self.poll()
            now = time.monotonic()
            frame = sys._current_frames()[self._main]
            if is_waiting(frame):
                waiting_s += now - seen
            else:
                own_s += now - seen
                places[place_of(frame)] += now - seen
            seen = now
            del frame  # it would keep alive what train_func has deleted
            if now >= began + self._every_s:
                try:
                    self._send(own_s, waiting_s, places)
                except (OSError, DistrainError):  # the agent is gone, or rank 0
                    return
                began, own_s, waiting_s = now, 0.0, 0.0
                places.clear()

    def _send(self, own_s: float, waiting_s: float, places: dict[str, float]) -> None:
        place, place_s = max(places.items(), key=itemgetter(1), default=("", 0.0))
        self._channel.send(
            wire.Vitals(
                attempt=self._context.attempt,
                rank=self._context.world_rank,
                own_s=round(own_s, 3),
                waiting_s=round(waiting_s, 3),
                place=place,
                place_s=round(place_s, 3),
            )
        )


def is_waiting(frame: FrameType) -> bool:
    """Return whether the innermost frame of a thread waits for other ranks, as far as can be seen."""
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    if _WAITING_FILES.search(file) or (function in _WAITING_FUNCTIONS and "/torch/" in file):
        return True
    return _WAITING_CALL.search(linecache.getline(file, frame.f_lineno or 0)) is not None


def place_of(frame: FrameType) -> str:
    """Return the innermost line of the user's code, such as ``load_batch (train.py:31)``, or an empty string."""
    outer: FrameType | None = frame
    while outer is not None:
        file, function = outer.f_code.co_filename, outer.f_code.co_name
        if not file.startswith(_OWN_FILES) and not LIBRARY_FILE.search(file):
            line = f"{os.path.basename(file)}:{outer.f_lineno}"
            return line if function == "<module>" else f"{function} ({line})"
        outer = outer.f_back
    return ""

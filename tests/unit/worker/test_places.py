"""Samples that a thread takes of the main thread."""

from __future__ import annotations

import os
import sys
import threading
import time

from distrain.worker import places


def _compute(until: float) -> None:
    while time.monotonic() < until:
        pass


def test_python_code_between_native_calls_is_seen() -> None:
    """After a usual sleep, none of the samples sees it."""
    seen: list[bool] = []
    over, main = threading.Event(), threading.get_ident()

    def sample() -> None:
        while not over.is_set():
            places.nap(0.007)
            frames = places.outwards(sys._current_frames()[main])
            seen.append(any(frame.f_code is _compute.__code__ for frame in frames))

    thread = threading.Thread(target=sample)
    thread.start()
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        _compute(time.monotonic() + 0.002)
        time.sleep(0.002)
    over.set()
    thread.join()
    assert sum(seen) > 0.15 * len(seen)


def test_a_forked_child_switches_threads_as_usual_and_can_nap() -> None:
    usual = sys.getswitchinterval()
    thread = threading.Thread(target=places.nap, args=(0.5,))
    thread.start()
    while sys.getswitchinterval() == usual:
        time.sleep(0.001)
    pid = os.fork()
    if pid == 0:
        os._exit(sys.getswitchinterval() != usual or places._switches_soon.locked())
    assert os.waitpid(pid, 0)[1] == 0
    thread.join()
    assert sys.getswitchinterval() == usual

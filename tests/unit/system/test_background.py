"""Threads: one for work that may take long, and several for work on many files."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from distrain.system.background import Background, in_threads
from distrain.system.loop import Loop
from tests.conftest import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def background(loop: Loop) -> Iterator[Background]:
    background = Background(loop, "test")
    yield background
    background.close()


def test_without_a_loop_work_is_done_at_once() -> None:
    background, done = Background(None, "test"), []
    background.do(lambda: 7, done.append)
    with pytest.raises(ZeroDivisionError):
        background.do(lambda: 1 // 0, done.append)
    assert done == [7]


def test_a_report_that_raises_keeps_no_other_one_back(loop: Loop, background: Background) -> None:
    done: list[int] = []

    def fail(number: int) -> None:
        raise RuntimeError

    background.do(lambda: 1, fail)
    background.do(lambda: 2, done.append)
    while loop._posted or not done:
        try:
            loop.step()
        except RuntimeError:
            continue
    assert (done, background.pending) == ([2], 0)


# -- several threads ---------------------------------------------------------------------------------------------------


def test_an_error_in_one_of_several_threads_ends_the_others() -> None:
    done = []

    def work(number: int) -> None:
        if number == 10:
            raise OSError("the disk is broken")
        done.append(number)
        time.sleep(0.001)

    with pytest.raises(OSError, match="the disk is broken"):
        in_threads(work, range(10_000))
    assert len(done) < 1000


def test_a_signal_handler_that_raises_ends_all_of_several_threads() -> None:
    class Alarm(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Alarm

    usual = signal.signal(signal.SIGALRM, ring)
    before, interrupted = len(os.listdir("/proc/self/task")), 0
    try:
        for moment in range(1, 40):
            try:
                signal.setitimer(signal.ITIMER_REAL, moment * 0.0005)
                in_threads(time.sleep, [0.001] * 60)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    assert interrupted
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= before, what="the end of the threads")

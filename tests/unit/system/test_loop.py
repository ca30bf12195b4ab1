"""The loop: descriptors, timers, and what callbacks may do to both."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def loop() -> Iterator[Loop]:
    opened = Loop()
    yield opened
    opened.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe's reading and writing end; a test that closes one must say so by replacing it with a copy."""
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def moment() -> float:
    return time.monotonic() - 1.0


# -- timers ----------------------------------------------------------------------------------------------------------


def test_data_comes_before_a_timer_that_is_due(loop: Loop, pipe: tuple[int, int]) -> None:
    """A lease that seems to have run out while this process slept is renewed by what lies in the pipe."""
    calls: list[str] = []
    loop.call_at("lease", moment(), lambda: calls.append("lease ran out"))
    loop.on_readable(pipe[0], lambda: (calls.append("heard"), loop.cancel("lease"))[0])
    os.write(pipe[1], b"ping")
    loop.step()
    assert calls == ["heard"]


def test_no_post_is_missed_that_comes_while_the_loop_wakes(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may post just before, or just after, the loop reads what has woken it."""
    heard: list[int] = []
    read = os.read

    def read_between_posts(fd: int, size: int) -> bytes:
        loop.post(lambda: heard.append(2))
        data = read(fd, size)
        loop.post(lambda: heard.append(3))
        return data

    loop.call_at("missed", time.monotonic() + 10, lambda: pytest.fail("a post did not wake the loop"))
    loop.post(lambda: heard.append(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", read_between_posts)
        loop.step()
    while len(heard) < 3:
        loop.step()
    loop.post(lambda: heard.append(4))
    while len(heard) < 4:
        loop.step()
    assert heard == [1, 2, 3, 4]


def test_signals_of_a_forked_child_are_its_own(loop: Loop) -> None:
    heard: list[int] = []
    began, begins = os.pipe()
    with loop.signals([signal.SIGTERM], heard.append):
        child = os.fork()
        if not child:
            os.write(begins, b"!")
            while True:  # a signal just before signal.pause() would be handled only after it
                time.sleep(0.01)
        os.read(began, 1)
        os.kill(child, signal.SIGTERM)
        deadline = time.monotonic() + 10.0
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        loop.call_in("wake", 0.0, lambda: None)
        loop.step()
    os.close(began)
    os.close(begins)
    assert (heard, ended) == ([], (child, signal.SIGTERM))

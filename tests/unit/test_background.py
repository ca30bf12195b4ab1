"""The thread for work that may take long: order, results, errors and its end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from distrain.background import Background, reraise
from distrain.loop import Loop

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


def test_work_is_done_in_order_and_reported_in_the_loops_thread(loop: Loop, background: Background) -> None:
    done: list[tuple[int, bool, bool]] = []
    me = threading.current_thread()
    for number in range(100):
        background.do(
            lambda number=number: (number, threading.current_thread() is me),
            lambda result: done.append((*result, threading.current_thread() is me)),
            reraise,
        )
    while background.pending:
        loop.step()
    assert done == [(number, False, True) for number in range(100)]


def test_the_loop_does_not_wait(loop: Loop, background: Background) -> None:
    go_on, fired, done = threading.Event(), [], []
    background.do(lambda: go_on.wait(20.0), done.append, reraise)
    loop.call_in("timer", 0.0, lambda: fired.append(True))
    loop.step()
    assert (fired, done) == ([True], [])
    go_on.set()
    while background.pending:
        loop.step()
    assert done == [True]


@pytest.mark.parametrize("error", [OSError("no space"), SystemExit(3)])
def test_an_error_of_the_work_is_reported(loop: Loop, background: Background, error: BaseException) -> None:
    def work() -> None:
        raise error

    failed: list[BaseException] = []
    background.do(work, lambda _: failed.append(AssertionError()), failed.append)
    background.do(lambda: 1, lambda _: None, reraise)
    while background.pending:
        loop.step()
    assert failed == [error]


def test_work_may_report_on_the_way(loop: Loop, background: Background) -> None:
    told: list[str] = []
    background.do(lambda: background.report(lambda: told.append("half")), lambda _: told.append("whole"), reraise)
    while background.pending:
        loop.step()
    assert told == ["half", "whole"]


def test_after_the_end_nothing_is_reported(loop: Loop, background: Background) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), []
    background.do(lambda: (begun.set(), go_on.wait(20.0)), done.append, reraise)
    background.do(lambda: done.append("dropped"), done.append, reraise)
    assert begun.wait(20.0)
    background.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "distrain-test":
            thread.join(20.0)
            assert not thread.is_alive()
    assert (done, background.pending) == ([], 0)


def test_without_a_loop_work_is_done_at_once() -> None:
    background, done = Background(None, "test"), []
    background.do(lambda: 7, done.append, reraise)
    with pytest.raises(ZeroDivisionError):
        background.do(lambda: 1 // 0, done.append, reraise)
    assert done == [7]

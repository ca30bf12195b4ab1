"""Signals that stop a run, and the handlers of the user."""

from __future__ import annotations

import atexit
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from distrain.coordinator.ranks import stop_signals
from distrain.coordinator.ranks.stop_signals import during_fit, note_stop
from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _no_stop_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "_stopped_by", ["SIGHUP"])


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    """The signals that the user's handler of SIGTERM gets."""
    found: list[Any] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def test_the_users_handler_is_called_once_after_the_run(heard: list[Any]) -> None:
    with during_fit():
        for reason in ("SIGTERM", "SIGTERM", "`distrain stop`", "SIGUSR1"):  # the user has no handler for the last one
            note_stop(reason)
        assert not heard
    assert heard == [signal.SIGTERM]
    with during_fit():
        pass
    assert heard == [signal.SIGTERM]


def test_in_another_thread_the_end_of_the_interpreter_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until fit() has ended."""
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    stopped: list[int] = []
    has_begun = threading.Event()

    def fit() -> None:
        loop = Loop()
        with during_fit(), loop.signals([signal.SIGINT], stopped.append):
            has_begun.set()
            while not stopped:
                loop.step()
        loop.close()

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    assert has_begun.wait(10)
    [interrupt] = at_exit
    interrupt()
    assert stopped == [signal.SIGINT]
    thread.join(10)
    assert not thread.is_alive()

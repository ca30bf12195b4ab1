"""Samples that a thread takes of the main thread."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from distrain.worker import places

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_forked_child_switches_threads_as_usual_and_can_nap() -> None:
    usual = sys.getswitchinterval()
    thread = threading.Thread(target=places.nap, args=(0.5,))
    thread.start()
    while sys.getswitchinterval() == usual:
        time.sleep(0.001)
    pid = os.fork()
    if pid == 0:
        try:
            is_usual = sys.getswitchinterval() == usual
            places.nap(0.0)  # would wait for ever
            os._exit(not is_usual)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    thread.join()
    assert sys.getswitchinterval() == usual


def test_the_users_code_may_switch_the_garbage_collector_off_and_on_at_any_time() -> None:
    usual = gc.get_threshold()
    with places.no_collection():
        assert gc.isenabled()
        gc.disable()
    assert not gc.isenabled()
    gc.enable()
    assert gc.get_threshold() == usual
    try:
        with places.no_collection():
            gc.set_threshold(500, 5, 5)
        assert gc.get_threshold() == (500, 5, 5)
    finally:
        gc.set_threshold(*usual)


# -- the names to which running code refers --------------------------------------------------------------------------


def _names() -> set[str]:
    return places.names_in_reach(sys._getframe(1))


def _meets() -> None:
    json.wanted  # type: ignore[attr-defined]


class Helper:
    def method(self) -> None:
        _meets()


helper, part = Helper(), functools.partial(_meets)


def calls_a_function() -> set[str]:
    return _names() if places else _meets()  # type: ignore[return-value, func-returns-value]


def calls_a_method_of_an_object() -> set[str]:
    return _names() if places else helper.method()  # type: ignore[return-value, func-returns-value]


def calls_a_part() -> set[str]:
    return _names() if places else part()  # type: ignore[return-value, func-returns-value]


def _with_closure(function: Callable[[], Any]) -> Callable[[], set[str]]:
    def calls_from_a_closure() -> set[str]:
        return _names() if places else function()  # type: ignore[no-any-return]

    return calls_from_a_closure


@pytest.mark.parametrize(
    "function",
    [
        calls_a_function, calls_a_method_of_an_object, calls_a_part,
        _with_closure(_meets), _with_closure(helper.method), _with_closure(part),
    ],
)  # fmt: skip
def test_names_are_found_wherever_running_code_can_reach_them(function: Callable[[], set[str]]) -> None:
    assert "wanted" in function()

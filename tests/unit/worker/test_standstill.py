"""The standstill of a thread where it cannot be watched, and variables that raise exceptions."""

from __future__ import annotations

import sys
import threading

from distrain.worker import standstill
from distrain.worker.standstill import LOOK_S, Standstill


def test_without_the_counters_of_the_kernel_nothing_stands_still() -> None:
    watched = Standstill(native_id=2**22 + 1)  # no thread has it, as no kernel counts it
    for look in range(5):
        watched.sample(sys._getframe(), watched.since + look * (LOOK_S + 0.1))
    assert watched.state == ""


class Hostile:
    """Raises exceptions, like a proxy of something that is gone."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)


def test_variables_that_raise_count_as_a_change() -> None:
    hostile = Hostile()
    watched = Standstill(threading.get_native_id())
    watched._note_variables(sys._getframe())
    watched._note_variables(sys._getframe())
    assert not watched._is_same_again
    assert hostile is not None


def test_variables_that_stay_the_same_are_the_same() -> None:
    count, things = 1, [1, 2]
    frame = sys._getframe()
    before = standstill._hash_of_variables(frame)
    assert standstill._hash_of_variables(frame) != 0
    count += 1
    assert standstill._hash_of_variables(frame) != before
    things.append(3)
    assert (count, len(things)) == (2, 3)

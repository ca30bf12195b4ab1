"""Items that a thread makes ahead of time: in their order, as soon as they are wanted, and none after a stop."""

from __future__ import annotations

import random
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from distrain.data.prefetch import Prefetched

if TYPE_CHECKING:
    from collections.abc import Iterator


def numbers(count: int, chance: random.Random) -> Iterator[int]:
    for number in range(count):
        if chance.random() < 0.02:
            time.sleep(chance.random() * 0.004)
        yield number


def test_items_come_in_their_order_however_fast_both_sides_are() -> None:
    chance = random.Random(0)
    for _ in range(100):
        count, most = chance.randrange(200), chance.randrange(1, 300)
        items = Prefetched(numbers(count, chance), chance.randrange(4))
        found = []
        for item in items:
            found.append(item)
            if chance.random() < 0.01:
                time.sleep(chance.random() * 0.004)
            if len(found) == most:
                break
        assert found == list(range(min(count, most)))


def test_an_item_that_is_ready_does_not_wait_for_the_next_one() -> None:
    """The next one may depend on what the caller does with it."""
    wanted: SimpleQueue[int] = SimpleQueue()
    wanted.put(0)
    items = iter(Prefetched(iter(wanted.get, None), 1))
    for number in range(5):
        assert next(items) == number
        wanted.put(number + 1)


def test_an_error_comes_after_the_items_before_it() -> None:
    def broken() -> Iterator[int]:
        yield from range(3)
        raise OSError("broken")

    items = iter(Prefetched(broken(), 2))
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="broken"):
        next(items)


def test_a_stop_ends_the_thread_and_a_caller_that_asks_again_gets_no_more() -> None:
    before = set(threading.enumerate())
    prefetched = Prefetched(iter(range(10**9)), 3)
    items = iter(prefetched)
    assert next(items) == 0
    prefetched.stop()
    assert set(threading.enumerate()) <= before
    assert len(list(items)) < 10**6

"""Batches that a thread makes while train_func computes. Runs in: worker."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

_T = TypeVar("_T")
_TOGETHER_S = 0.002
"""Items that are made within this time are handed over together, because the two threads wait for each other then."""


class Prefetched(Generic[_T]):
    """The items of an iterator, which a thread makes ahead of time.

    count: the number of groups that are made ahead; 0: the caller makes the items. A group is one item, or as many as
        are made in 2 ms.
    """

    def __init__(self, items: Iterator[_T], count: int) -> None:
        self._items = items
        self._count = count
        self._made: list[_T] = []
        self._made_in_s = 0.0
        """Seconds that it took to make those."""
        self._changed = threading.Condition()
        self._is_awaited = False
        """True if the caller has nothing left: it gets the next item at once."""
        self._is_over = False
        self._is_stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._make, name="distrain-data", daemon=True)

    def __iter__(self) -> Iterator[_T]:
        if not self._count:
            yield from self._items
            return
        self._thread.start()
        try:
            while group := self._next_group():
                yield from group
            if self._error is not None:
                raise self._error
        finally:
            self._tell_to_stop()

    def _next_group(self) -> list[_T]:
        """Return a part of what is there. Wait for one item if nothing is; return none at the end."""
        with self._changed:
            if not self._made:
                self._changed.wait_for(lambda: self._is_full or self._is_over, _TOGETHER_S)
                self._is_awaited = True
                self._changed.wait_for(lambda: self._made or self._is_over)
                self._is_awaited = False
            size = -(-len(self._made) // self._count)
            group, self._made = self._made[:size], self._made[size:]
            self._made_in_s *= len(self._made) / max(1, size + len(self._made))
            self._changed.notify()
            return group

    @property
    def _is_full(self) -> bool:
        return len(self._made) >= self._count and self._made_in_s >= self._count * _TOGETHER_S

    def _make(self) -> None:
        try:
            began = time.monotonic()
            for item in self._items:
                with self._changed:
                    self._made.append(item)
                    self._made_in_s += time.monotonic() - began
                    if self._is_awaited or self._is_full:
                        self._changed.notify()
                    self._changed.wait_for(lambda: self._is_stopped or not self._is_full)
                    if self._is_stopped:
                        self._made.clear()
                        return
                began = time.monotonic()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify()

    def _tell_to_stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._made.clear()  # else it stays in memory
            self._changed.notify()

    def stop(self) -> None:
        """Make no more items. Return when the one that is being made is there."""
        if self._thread.is_alive():
            self._tell_to_stop()
            self._thread.join()

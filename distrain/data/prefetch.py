"""Batches that a thread makes while train_func computes. Runs in: worker."""

from __future__ import annotations

import threading
import time
from collections import deque
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
        self._lock = threading.Lock()
        """For everything that follows."""
        self._changed = threading.Condition(self._lock)
        self._made: deque[list[_T]] = deque()
        """Groups that are complete."""
        self._group: list[_T] = []
        """The group that is being made."""
        self._is_awaited = False
        """True if the caller has nothing left: it gets the next item at once."""
        self._is_ended = False
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
        """Return the items that are ready. Wait for one if there are none; return nothing at the end."""
        with self._lock:
            if not self._changed.wait_for(self._has_news, _TOGETHER_S) and not self._group:
                self._is_awaited = True
                self._changed.wait_for(self._has_news)
            if not self._made:
                self._hand_over()
            self._changed.notify()
            return self._made.popleft()

    def _has_news(self) -> bool:
        return bool(self._made) or self._is_ended

    def _make(self) -> None:
        try:
            began = time.monotonic()
            for item in self._items:
                with self._lock:
                    self._group.append(item)
                    if self._is_awaited or time.monotonic() - began > _TOGETHER_S:
                        self._hand_over()
                        self._changed.wait_for(lambda: len(self._made) < self._count or self._is_stopped)
                        began = time.monotonic()
                if self._is_stopped:
                    return
        except BaseException as error:
            self._error = error
        finally:
            with self._lock:
                self._is_ended = True
                self._changed.notify()

    def _hand_over(self) -> None:
        self._made.append(self._group)
        self._group, self._is_awaited = [], False
        self._changed.notify()

    def _tell_to_stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            self._made.clear()  # else what it holds stays in memory
            self._group = []
            self._changed.notify()

    def stop(self) -> None:
        """Make no more items. Return when the one that is being made is there."""
        if self._thread.is_alive():
            self._tell_to_stop()
            self._thread.join()

"""Batches that a thread makes while train_func computes. Runs in: worker."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
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
        self._made: SimpleQueue[list[_T] | None] = SimpleQueue()
        """Groups. None is the end."""
        self._allowed: SimpleQueue[None] = SimpleQueue()
        """One entry for each group that may be made."""
        self._group: list[_T] = []
        """The group that is being made."""
        self._is_awaited = False
        """True if the caller has nothing left: it gets the next item at once."""
        self._lock = threading.Lock()
        """For the group, and for moving it."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._make, name="distrain-data", daemon=True)
        self._is_stopped = False

    def __iter__(self) -> Iterator[_T]:
        if not self._count:
            yield from self._items
            return
        self._thread.start()
        try:
            for _ in range(self._count):
                self._allowed.put(None)
            while (group := self._next_group()) is not None:
                yield from group
            if self._error is not None:
                raise self._error
        finally:
            self._tell_to_stop()

    def _next_group(self) -> list[_T] | None:
        """Return what is there. Wait for one item if nothing is."""
        try:
            group = self._made.get(timeout=_TOGETHER_S)
        except Empty:
            with self._lock:
                if self._made.empty():
                    part, self._group = self._group, []
                    if part:
                        return part
                    self._is_awaited = True
            group = self._made.get()
        self._allowed.put(None)
        return group

    def _make(self) -> None:
        try:
            self._allowed.get()
            began = time.monotonic()
            for item in self._items:
                with self._lock:
                    self._group.append(item)
                    is_complete = self._is_awaited or time.monotonic() - began > _TOGETHER_S
                    if is_complete:
                        self._hand_over()
                if is_complete:
                    self._allowed.get()
                    began = time.monotonic()
                if self._is_stopped:
                    return
        except BaseException as error:
            self._error = error
        finally:
            with self._lock:
                self._hand_over()
            self._made.put(None)

    def _hand_over(self) -> None:
        if self._group and not self._is_stopped:
            self._made.put(self._group)
        self._group, self._is_awaited = [], False

    def _tell_to_stop(self) -> None:
        self._is_stopped = True
        self._allowed.put(None)
        while not self._made.empty():  # else what it holds stays in memory
            self._made.get()
        self._made.put(None)  # in case that the caller asks again

    def stop(self) -> None:
        """Make no more items. Return when the one that is being made is there."""
        if self._thread.is_alive():
            self._tell_to_stop()
            self._thread.join()

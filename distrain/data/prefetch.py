"""Batches that a thread makes while train_func computes. Runs in: worker."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty, Queue
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

_T = TypeVar("_T")


class Prefetched(Generic[_T]):
    """The items of an iterator, which a thread makes ahead of time.

    count: the number of items that are made ahead; 0: the caller makes the items.
    """

    def __init__(self, items: Iterator[_T], count: int) -> None:
        self._items = items
        self._made: Queue[tuple[_T] | BaseException | None] = Queue(count)
        """Items, and an error or None at the end."""
        self._is_ahead = count > 0
        self._is_stopped = False
        self._thread = threading.Thread(target=self._make, name="distrain-data", daemon=True)

    def __iter__(self) -> Iterator[_T]:
        if not self._is_ahead:
            yield from self._items
            return
        self._thread.start()
        try:
            while not self._is_stopped and (made := self._made.get()) is not None:
                if isinstance(made, BaseException):
                    raise made
                yield made[0]
        finally:
            self._tell_to_stop()

    def _make(self) -> None:
        end: BaseException | None = None
        try:
            for item in self._items:
                self._made.put((item,))
                if self._is_stopped:
                    break
        except BaseException as error:
            end = error
        if not self._is_stopped:
            self._made.put(end)

    def _tell_to_stop(self) -> None:
        self._is_stopped = True
        with suppress(Empty):  # else what it holds stays in memory, and the thread may wait for room
            while True:
                self._made.get_nowait()

    def stop(self) -> None:
        """Make no more items. Return when the one that is being made is there."""
        while self._thread.is_alive():
            self._tell_to_stop()
            self._thread.join(0.01)

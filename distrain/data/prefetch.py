"""Batches that a thread makes while train_func computes. Runs in: worker."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

_T = TypeVar("_T")


def ahead(items: Iterator[_T], count: int) -> Iterator[_T]:
    """Yield the items. A thread makes up to ``count`` of them ahead of time; with 0, the caller makes them."""
    return _Ahead(items, count).taken() if count else items


class _Ahead(Generic[_T]):
    """A thread that reads an iterator, and a queue of what it has read."""

    def __init__(self, items: Iterator[_T], count: int) -> None:
        self._items = items
        self._count = count
        self._queue: deque[_T] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None

    def taken(self) -> Iterator[_T]:
        """Yield the items; stop the thread when the caller stops asking."""
        thread = threading.Thread(target=self._read, name="distrain-data", daemon=True)
        thread.start()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self._ended)
                    if not self._queue:
                        break
                    item = self._queue.popleft()
                    self._changed.notify_all()
                yield item
            if self._error is not None:
                raise self._error
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _read(self) -> None:
        try:
            for item in self._items:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._queue) < self._count)
                    if self._closed:
                        return
                    self._queue.append(item)
                    self._changed.notify_all()
                del item  # else it stays in memory while the next one is made
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

"""Batches that a thread makes while train_func computes. Runs in: worker."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

_T = TypeVar("_T")
_END = object()


class Prefetched(Generic[_T]):
    """The items of an iterator. A thread makes up to ``count`` of them ahead of time; with 0, the caller makes them."""

    def __init__(self, items: Iterator[_T], count: int) -> None:
        self._items = items
        self._count = count
        self._made: SimpleQueue[Any] = SimpleQueue()
        self._allowed: SimpleQueue[None] = SimpleQueue()
        """One entry for each item that may be made."""
        self._errors: list[BaseException] = []
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
            while (item := self._made.get()) is not _END:
                self._allowed.put(None)
                yield item
            if self._errors:
                raise self._errors[0]
        finally:
            self._stop()

    def _make(self) -> None:
        try:
            self._allowed.get()
            while not self._is_stopped:
                self._made.put(next(self._items, _END))
                self._allowed.get()
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._made.put(_END)

    def _stop(self) -> None:
        self._is_stopped = True
        self._allowed.put(None)

    def stop(self) -> None:
        """Make no more items. Return when the one that is being made is there."""
        if self._thread.is_alive():
            self._stop()
            self._thread.join()

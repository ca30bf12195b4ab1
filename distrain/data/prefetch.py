"""Batches that a thread makes while train_func computes. Runs in: worker."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

_T = TypeVar("_T")
_END = object()


class Prefetched(Generic[_T]):
    """The items of an iterator, which a thread makes ahead of time.

    count: the number of items that are made ahead; 0: the caller makes the items.
    """

    def __init__(self, items: Iterator[_T], count: int) -> None:
        self._items = items
        self._count = count
        self._is_stopped = False
        self._thread = ThreadPoolExecutor(1, "distrain-data")

    def __iter__(self) -> Iterator[_T]:
        if not self._count:
            yield from self._items
            return
        made: deque[Future[Any]] = deque()
        try:
            while not self._is_stopped:
                while len(made) < self._count:
                    made.append(self._thread.submit(next, self._items, _END))
                if (found := made.popleft().result()) is _END:
                    return
                made.append(self._thread.submit(next, self._items, _END))
                yield found
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Make no more items. Return when the one that is being made is there."""
        self._is_stopped = True
        self._thread.shutdown(cancel_futures=True)

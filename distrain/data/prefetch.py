"""Batches that a thread makes while train_func computes. Runs in: worker."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

_T = TypeVar("_T")
_END = object()


def ahead(items: Iterator[_T], count: int) -> Iterator[_T]:
    """Yield the items. A thread makes up to ``count`` of them ahead of time; with 0, the caller makes them."""
    return _made_ahead(items, count) if count else items


def _made_ahead(items: Iterator[_T], count: int) -> Iterator[_T]:
    made: SimpleQueue[Any] = SimpleQueue()
    allowed: SimpleQueue[bool] = SimpleQueue()  # a True for each item that may be made, and a False at the end
    errors: list[BaseException] = []

    def make() -> None:
        try:
            while allowed.get():
                made.put(next(items, _END))
        except BaseException as error:
            errors.append(error)
        finally:
            made.put(_END)

    threading.Thread(target=make, name="distrain-data", daemon=True).start()
    try:
        for _ in range(count):
            allowed.put(True)
        while (item := made.get()) is not _END:
            allowed.put(True)
            yield item
        if errors:
            raise errors[0]
    finally:
        allowed.put(False)

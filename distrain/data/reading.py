"""The rows of a source in the order of an epoch. Runs in: worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distrain.data.blocks import in_pieces, row_count, rows_at
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrain.data.blocks import Block
    from distrain.data.order import RowOrder, Span
    from distrain.data.sources import TableSource


def in_order(source: TableSource, order: RowOrder, epoch: int, span: Span, batch_size: int) -> Iterator[Block]:
    """Yield the rows at these positions of an epoch's order."""
    if span[0] == span[1]:
        return
    if not order.window:
        yield from _sequence(source, order, epoch, span, batch_size)
        return
    start, stop = span
    size, rows = order.window, source.rows
    first, end = start // size * size, min(rows, -(-stop // size) * size)
    for window in in_pieces(_sequence(source, order, epoch, (first, end), batch_size), size):
        yield shuffled(window, order, epoch, first, span)
        first += size


def shuffled(window: Block, order: RowOrder, epoch: int, first: int, span: Span) -> Block:
    """Return the rows at the positions in ``span`` of a window that begins at ``first``, after shuffling it."""
    rows = row_count(window)
    inside = np.arange(max(0, span[0] - first), min(rows, span[1] - first))
    return rows_at(window, order.permutation(rows, epoch, "window", first)(inside))


def _sequence(source: TableSource, order: RowOrder, epoch: int, span: Span, batch_size: int) -> Iterator[Block]:
    """Yield the rows at these positions of the order that has no windows."""
    start, stop = span
    if source.is_random:
        permutation = order.permutation(source.rows, epoch, "rows") if order.shuffled else None
        step = max(1, source.at_once // batch_size) * batch_size
        for first in range(start, stop, step):
            places = np.arange(first, min(stop, first + step))
            block = source.take(permutation(places) if permutation else places)
            if row_count(block) != len(places):
                raise DataError(f"it gave {row_count(block)} rows when it was asked for {len(places)}")
            yield block
        return
    sizes = source.block_rows
    blocks = np.arange(len(sizes))
    if order.shuffled:
        blocks = order.permutation(len(sizes), epoch, "blocks")(blocks)
    ends = np.cumsum(sizes[blocks])
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left")) + 1
    skip = start - int(ends[first] - sizes[blocks[first]])
    yield from source.read(blocks[first:last].tolist(), skip, stop - start)

"""One pass of one rank over a dataset: which rows, in which order and in which batches. Runs in: worker.

A pass begins at a position, as a checkpoint has it, and knows the position after each batch that was taken from it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distrain.data.blocks import Block, in_pieces, row_count, rows_after, rows_at, rows_between, to_columns
from distrain.data.order import Division, RowOrder, Span, length, part, rows_left
from distrain.data.sources import UNDIVIDED, Stream, TableSource, checksum
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SAMPLED_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """The way in which the rows of a pass become batches.

    batch_size: rows of a batch of one rank; None: all its rows are one batch.
    drop_last: leave out the last batch if it has fewer rows.
    order: the order of the rows.
    """

    batch_size: int | None
    drop_last: bool
    order: RowOrder


@dataclass(frozen=True, slots=True)
class Worker:
    """The rank of this worker, and the number of ranks among which the rows are divided."""

    rank: int
    ranks: int


def _new_share(rows: int, ranks: int, before: int) -> int:
    """Return the number of rows of each rank. Raises DataError if there are none, and none came before."""
    if rows < ranks and not before:
        raise DataError(f"{rows} rows are too few for {ranks} ranks; for all rows on each rank, {UNDIVIDED}")
    return rows // ranks


# -- sources that know their rows ------------------------------------------------------------------------------------


class TablePass:
    """A pass over a source that knows its rows. Each rank has consecutive rows of the order.

    left_out: rows of the pass that no rank gets because they do not divide evenly. facts: about what it reads, if the
        source has none.
    begun: rows before the one with which it begins. place: the same, for people.
    """

    facts: Mapping[str, Any] = {}

    def __init__(
        self, source: TableSource, worker: Worker, options: PassOptions, epoch: int, position: dict[str, Any] | None
    ) -> None:
        self.epoch = epoch
        self._source = source
        self.options = options
        self._before = [Division(*fields) for fields in position.get("divisions", [])] if position else []
        rows = source.rows
        if not rows:
            raise DataError("it has no rows")
        left = rows_left(rows, self._before)
        self.begun = rows - length(left)
        self.place = f"after {self.begun:,} of {rows:,} rows{'' if left else ', so its loop has no batches'}"
        self._taken = 0
        if (last := self._last_division(rows, worker.ranks)) is not None:
            self._before.pop()
            left, share, self._taken = rows_left(rows, self._before), last.share, last.taken_by(worker.rank)
        else:
            share = _new_share(length(left), worker.ranks, self.begun)
        self.left_out = length(left) - share * worker.ranks
        self._division = Division(worker.ranks, share, 0)
        self._spans = [*part(left, worker.rank * share + self._taken, (worker.rank + 1) * share)]

    def _last_division(self, rows: int, ranks: int) -> Division | None:
        """Return the last division if it was among as many ranks: each continues its own rows, in the same batches.

        None if there was none, if the ranks have taken different numbers of rows, or if the user continues
        with data that has changed.
        """
        if not self._before or self._before[-1].ranks != ranks or isinstance(self._before[-1].taken, list):
            return None
        *before, last = self._before
        return last if last.share == length(rows_left(rows, before)) // ranks else None

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield each batch before the functions, and its number of rows."""
        rows = length(self._spans)
        size = self.options.batch_size or max(1, rows)
        found = (
            block
            for span in self._spans
            for block in in_order(self._source, self.options.order, self.epoch, span, size)
        )
        for block in in_pieces(found, size):
            count = row_count(block)
            rows -= count
            if count == size or not self.options.drop_last:
                yield block, count
        if rows:
            raise DataError(f"read {rows} rows too few")

    def took(self, rows: int) -> None:
        """Note that train_func has got the next batch."""
        self._taken += rows

    def position(self) -> dict[str, Any]:
        """Return the position after the batches that were taken, as JSON."""
        return {"divisions": [*self._before, self._division._replace(taken=self._taken)]}


# -- streams ---------------------------------------------------------------------------------------------------------


class StreamPass:
    """A pass over a stream, with the members of a :class:`TablePass`.

    All ranks read the whole stream. Of the rows of each step, every rank takes a batch.
    """

    left_out = 0

    def __init__(
        self, stream: Stream, worker: Worker, options: PassOptions, epoch: int, position: dict[str, Any] | None
    ) -> None:
        if options.batch_size is None:
            raise ValueError("batch_size=None: a stream does not know how many rows it has; name a number")
        self.epoch = epoch
        self.options = options
        self.facts: Mapping[str, Any] = {}
        self._stream = stream
        self._worker = worker
        self._size = options.batch_size
        self._rows = self.begun = position.get("rows", 0) if position else 0
        self.place = f"after {self._rows:,} rows, which are read again"

    def blocks(self) -> Iterator[tuple[Block, int]]:
        rows, (rank, ranks) = self.begun, (self._worker.rank, self._worker.ranks)
        for step in in_pieces(self._left(), self._size * ranks):
            self.facts = self.facts or _sample(step)
            share = self._size
            if (count := row_count(step)) < share * ranks:
                share = _new_share(count, ranks, rows)
                self.left_out = count - share * ranks
                if not share or (share < self._size and self.options.drop_last):
                    return
            rows += count
            yield rows_between(step, rank * share, (rank + 1) * share), share
        if not rows:
            raise DataError("it has no rows")

    def _left(self) -> Iterator[Block]:
        """Yield the rows after the first ones, which were taken before."""
        order, skip = self.options.order, self.begun
        blocks = self._stream.read(self._size * self._worker.ranks, epoch=self.epoch, is_divided=self._worker.ranks > 1)
        if order.window:
            windows = enumerate(in_pieces(blocks, order.window))
            places = ((rows, number * order.window) for number, rows in windows)
            blocks = (shuffled(rows, order, self.epoch, at, (at, at + row_count(rows))) for rows, at in places)
        for block in blocks:
            count = row_count(block)
            if skip < count:
                yield rows_between(block, skip, count)
            skip = max(0, skip - count)
        if skip:
            raise DataError(f"the stream has ended after {self.begun - skip} rows; the checkpoint was taken after more")

    def took(self, rows: int) -> None:
        self._rows += rows * self._worker.ranks

    def position(self) -> dict[str, Any]:
        return {"rows": self._rows}


def _sample(step: Block) -> dict[str, int]:
    """Return checksums of rows of a stream, which all ranks should read. Floats may be random, as in augmentations."""
    with contextlib.suppress(DataError):
        columns = to_columns(rows_between(step, 0, _SAMPLED_ROWS)).items()
        return {name: checksum(column) for name, column in columns if column.ndim == 1 and column.dtype.kind in "iuO"}
    return {}


def make_pass(
    source: TableSource | Stream, worker: Worker, options: PassOptions, epoch: int, position: dict[str, Any] | None
) -> TablePass | StreamPass:
    """Return a pass that begins at a position of the same epoch; None: at its first row."""
    if isinstance(source, Stream):
        return StreamPass(source, worker, options, epoch, position)
    return TablePass(source, worker, options, epoch, position)


# -- the rows in the order of an epoch ---------------------------------------------------------------------------------


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
    blocks = blocks[sizes[blocks] > 0]
    ends = np.cumsum(sizes[blocks])
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left")) + 1
    skip = start - int(ends[first] - sizes[blocks[first]])
    parts = (rows for block in blocks[first:last].tolist() for rows in source.read(block))
    yield from rows_after(parts, skip, stop - start)

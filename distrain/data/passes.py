"""One pass of one rank over a dataset: which rows, in which order and in which batches. Runs in: worker.

A pass begins at a position, as a checkpoint has it, and knows the position after each batch that was taken from it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distrain.data.blocks import in_pieces, joined, row_count, rows_at, rows_between, to_columns
from distrain.data.order import Division, length, rows_left, share_of, share_of_each
from distrain.data.sources import checksum, in_order, shuffled
from distrain.data.streams import Mark, OpenStream, Stream
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from distrain.data.blocks import Block
    from distrain.data.order import RowOrder
    from distrain.data.sources import TableSource
    from distrain.data.transforms import OpenDataset

UNEVEN = ("drop", "pad")
UNDIVIDED = "leave its name out of DataConfig(datasets_to_split=[...]), or have all ranks read the same rows"
_SAMPLED_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """How the rows of a pass become batches.

    batch_size: rows of a batch of one rank; None: all its rows are one batch.
    drop_last: leave out the last batch if it has fewer rows.
    order: the order of the rows.
    uneven: what happens to rows that do not divide evenly among the ranks; one of :data:`UNEVEN`.
    """

    batch_size: int | None
    drop_last: bool
    order: RowOrder
    uneven: str


@dataclass(frozen=True, slots=True)
class Worker:
    """The rank of this worker, and the number of ranks among which the rows are divided."""

    rank: int
    ranks: int


def _new_share(rows: int, ranks: int, uneven: str, before: int) -> int:
    """Return the number of rows of each rank. Raises DataError if there are none, and none came before."""
    share = share_of_each(rows, ranks, pad=uneven == "pad")
    if not share and not before:
        raise DataError(f"{rows} rows are too few for {ranks} ranks; uneven='pad' repeats some")
    return share


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
            share = _new_share(length(left), worker.ranks, options.uneven, self.begun)
        self.left_out = max(0, length(left) - share * worker.ranks)
        self._division = Division(worker.ranks, share, 0)
        self._spans = share_of(left, worker.rank, share, self._taken)

    def _last_division(self, rows: int, ranks: int) -> Division | None:
        """Return the last division if it was among as many ranks: each continues its own rows, in the same batches.

        None if there was none, if the ranks have taken different numbers of rows, or if the user continues
        with data that has changed.
        """
        if not self._before or self._before[-1].ranks != ranks or isinstance(self._before[-1].taken, list):
            return None
        *before, last = self._before
        left = length(rows_left(rows, before))
        return last if last.share in (share_of_each(left, ranks, pad=pad) for pad in (False, True)) else None

    def blocks(self) -> Iterator[tuple[Block, int, Any]]:
        """Yield each batch before the functions, its number of rows, and what :meth:`took` needs to know."""
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
                yield block, count, None
        if rows:
            raise DataError(f"read {rows} rows too few")

    def took(self, rows: int, note: Any) -> None:
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
    facts: Mapping[str, Any] = {}

    def __init__(
        self, stream: Stream, worker: Worker, options: PassOptions, epoch: int, position: dict[str, Any] | None
    ) -> None:
        if options.batch_size is None:
            raise ValueError("batch_size=None: a stream does not know how many rows it has; name a number")
        self.epoch = epoch
        self._worker = worker
        self.options = options
        self._size = options.batch_size
        self._stream = OpenStream(stream, epoch)
        if worker.ranks > 1 and self._stream.divides_itself:
            raise DataError(f"the stream divides itself by rank, so it must not be divided once more: {UNDIVIDED}")
        self._rows = self.begun = position.get("rows", 0) if position else 0
        self._mark = Mark.from_json(position["mark"]) if position and position.get("mark") else None
        self.place = f"after {self._rows:,} rows"
        self._seen: dict[str, int] = {}
        if self._rows and self._mark is None:
            reason = "has no state_dict()" if stream.trusts_states else "shuffles rows that are not in its state_dict()"
            self.place += f", which are read again because the stream {reason}"

    def blocks(self) -> Iterator[tuple[Block, int, Any]]:
        window = self.options.order.window
        start = self._rows // window * window if window else self._rows
        self._stream.skip_to(start, self._mark)
        marks: deque[Mark] = deque([self._mark] if self._mark else [])
        rows, (rank, ranks) = self._rows, (self._worker.rank, self._worker.ranks)
        for step in in_pieces(self._windows(marks, start), self._size * ranks):
            count, share = row_count(step), self._size
            self._seen = self._seen or _sample(step)
            if count < share * ranks:
                share = _new_share(count, ranks, self.options.uneven, rows)
                self.left_out = max(0, count - share * ranks)
                if not share or (share < self._size and self.options.drop_last):
                    return
            rows += count
            while len(marks) > 1 and marks[1].rows <= rows:
                marks.popleft()
            first, end = rank * share, (rank + 1) * share
            own = rows_between(step, first, end) if end <= count else rows_at(step, np.arange(first, end) % count)
            yield own, share, (rows, marks[0] if marks and marks[0].rows <= rows else None, self._seen)
        if not rows:
            raise DataError("it has no rows")

    def _windows(self, marks: deque[Mark], start: int) -> Iterator[Block]:
        """Yield windows of rows, the first one from the first row on that was not taken: shuffled, or one step each."""
        order, missing = self.options.order, 0
        size = order.window or self._size * self._worker.ranks
        blocks = self._stream.blocks(lambda: missing)
        while True:
            if mark := self._stream.mark():
                marks.append(mark)
            parts: list[Block] = []
            missing = size
            while missing and (block := next(blocks, None)) is not None:
                parts.append(block)
                missing -= row_count(block)
            if not parts:
                return
            rows = joined(parts)
            yield shuffled(rows, order, self.epoch, start, (self._rows, start + size)) if order.window else rows
            start += size

    def took(self, rows: int, note: Any) -> None:
        self._rows, self._mark, self.facts = note[0], note[1] or self._mark, note[2]

    def position(self) -> dict[str, Any]:
        return {"rows": self._rows, "mark": self._mark.as_json() if self._mark else None}


def _sample(step: Block) -> dict[str, int]:
    """Return checksums of rows of a stream, which all ranks should read. Floats may be random, as in augmentations."""
    with contextlib.suppress(DataError):
        columns = to_columns(rows_between(step, 0, _SAMPLED_ROWS)).items()
        return {name: checksum(column) for name, column in columns if column.ndim == 1 and column.dtype.kind in "iuO"}
    return {}


def make_pass(
    opened: OpenDataset, worker: Worker, options: PassOptions, epoch: int, position: dict[str, Any] | None
) -> TablePass | StreamPass:
    """Return a pass that begins at a position of the same epoch; None: at its first row."""
    if isinstance(opened.source, Stream):
        return StreamPass(opened.source, worker, options, epoch, position)
    return TablePass(opened.source, worker, options, epoch, position)

"""Sources of rows: what a dataset reads from, and the order in which it does.

A :class:`TableSource` knows how many rows it has, in which blocks. A :class:`~distrain.data.streams.Stream` does not.
Runs in: worker; objects in the user's memory are pickled with the job.
"""

from __future__ import annotations

import copy
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distrain.data.blocks import (
    as_block,
    empty_column,
    in_pieces,
    is_instance,
    row_count,
    rows_after,
    rows_at,
    rows_between,
    to_columns,
)
from distrain.errors import DataError
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrain.data.blocks import Block
    from distrain.data.order import Indices, RowOrder, Span

ROWS_AT_ONCE = 1024
"""Rows that are read at a time, at most, by functions that need no batches."""
_ROWS_FROM_MEMORY = 1 << 14
_BYTES_FROM_MEMORY = 4 << 20


@dataclass(frozen=True, slots=True)
class Schema:
    """The names of the columns, and their types: pyarrow's, or numpy's for data that is not in Arrow's format.

    ::

        Schema(["x"], [np.dtype("int64")]).names
    """

    names: list[str]
    types: list[Any]

    def no_rows(self) -> Block:
        """Return a block without rows that has these columns."""
        return {name: empty_column(kind) for name, kind in zip(self.names, self.types, strict=True)}

    def __str__(self) -> str:
        return ", ".join(f"{name}: {kind}" for name, kind in zip(self.names, self.types, strict=True))


def schema_of(block: Block) -> Schema:
    """Return the columns of some rows."""
    columns = to_columns(block)
    return Schema(list(columns), [column.dtype for column in columns.values()])


class TableSource(ABC):
    """Rows in blocks of known sizes. A block is what can be read as a whole: a row group, or a file."""

    is_random = False
    """True if :meth:`take` finds any row at once."""
    at_once = 1
    """The number of rows that :meth:`take` had better take together, if batches have fewer."""

    @property
    @abstractmethod
    def block_rows(self) -> Indices:
        """The number of rows of each block. The first use may read files."""

    @property
    def rows(self) -> int:
        """The number of all rows."""
        return int(self.block_rows.sum())

    @property
    def row_bytes(self) -> float:
        """The approximate size of a row in memory; 0 if it does not matter because all rows can be shuffled."""
        return 0

    @abstractmethod
    def read(self, block: int) -> Iterator[Block]:
        """Yield the rows of a block, in parts."""

    def take(self, rows: Indices) -> Block:
        """Return rows by their numbers, if ``is_random``."""
        raise NotImplementedError

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return JSON that changes if the data does."""

    def first(self, rows: int) -> Block:
        """Return some of the first rows, at most so many, and at least one if there are any."""
        found = (part for block in range(len(self.block_rows)) for part in self.read(block))
        return rows_between(next(filter(row_count, found), []), 0, rows)

    def schema(self) -> Schema:
        """Return the columns of the first row."""
        return schema_of(self.first(1))


class RandomSource(TableSource):
    """Rows that are found at once by their numbers. ``rows``: how many there are."""

    is_random = True
    rows = 0

    def __init__(self, rows: int) -> None:
        self.rows = rows

    @property
    def block_rows(self) -> Indices:
        return np.minimum(ROWS_AT_ONCE, self.rows - np.arange(0, self.rows, ROWS_AT_ONCE))

    def read(self, block: int) -> Iterator[Block]:
        yield self.take(np.arange(block * ROWS_AT_ONCE, min(self.rows, (block + 1) * ROWS_AT_ONCE)))

    def first(self, rows: int) -> Block:
        return self.take(np.arange(min(rows, self.rows))) if self.rows else []


class MemorySource(RandomSource):
    """A block in memory: a dict of numpy arrays, a pyarrow Table, or a list of rows. Its readers get copies."""

    def __init__(self, block: Block) -> None:
        super().__init__(row_count(block))
        self._block = block
        if not isinstance(block, list):
            sizes = [column.nbytes for column in block.values()] if isinstance(block, dict) else [block.nbytes]
            row_bytes = sum(sizes) / max(1, self.rows)
            self.at_once = int(min(_ROWS_FROM_MEMORY, max(1, _BYTES_FROM_MEMORY / max(1, row_bytes))))

    def take(self, rows: Indices) -> Block:
        first, last = (int(rows[0]), int(rows[-1])) if len(rows) else (0, -1)
        if last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all()):
            found = rows_between(self._block, first, last + 1)
        else:
            found = rows_at(self._block, rows)
        return copy.deepcopy(found) if isinstance(found, (dict, list)) else found

    def facts(self) -> dict[str, Any]:
        sample = rows_at(self._block, np.linspace(0, self.rows - 1, min(self.rows, 100), dtype=np.int64))
        return {"rows": self.rows, "sample": {name: checksum(col) for name, col in to_columns(sample).items()}}

    def schema(self) -> Schema:
        if is_instance(self._block, "pyarrow", "Table"):
            return Schema(list(self._block.schema.names), list(self._block.schema.types))
        return schema_of(rows_between(self._block, 0, 1))


def checksum(column: np.ndarray[Any, Any]) -> int:
    """Return a number that is the same in every process. Of objects that aren't plain values, it has only the types."""
    if column.dtype != object:
        return zlib.crc32(column.tobytes())
    plain = (str, bytes, int, float, type(None))
    return zlib.crc32(repr([item if isinstance(item, plain) else type(item).__name__ for item in column]).encode())


class RangeSource(RandomSource):
    """The numbers below ``rows``, in the column ``id``."""

    at_once = _ROWS_FROM_MEMORY

    def take(self, rows: Indices) -> Block:
        return {"id": rows}

    def facts(self) -> dict[str, Any]:
        return {"rows": self.rows}


class ItemSource(RandomSource):
    """An object with ``len()`` whose items are rows, such as a ``torch.utils.data.Dataset``."""

    def __init__(self, items: Any) -> None:
        super().__init__(len(items))
        self._items = items

    def take(self, rows: Indices) -> Block:
        places = rows.tolist()
        if hasattr(self._items, "__getitems__"):
            return list(self._items.__getitems__(places))
        return [self._items[place] for place in places]

    def facts(self) -> dict[str, Any]:
        return {"rows": self.rows, "type": type(self._items).__qualname__}


class HuggingFaceSource(RandomSource):
    """A ``datasets.Dataset``. Rows come as Arrow has them, unless the user has set a format or a transform.

    Rows with images and the like come as Python's values, decoded. In the numpy format, values would lose digits.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(len(dataset))
        self._dataset = dataset
        needs_decoding, columns = require("datasets.features.features").require_decoding, dataset.format["columns"]
        if dataset.format["type"] is None and not any(needs_decoding(dataset.features[name]) for name in columns):
            self._dataset = dataset.with_format("arrow", columns=columns)

    def take(self, rows: Indices) -> Block:
        found = self._dataset[rows]
        return as_block(dict(found) if isinstance(found, Mapping) else found, "the dataset's format or transform")

    def facts(self) -> dict[str, Any]:
        places = np.linspace(0, self.rows - 1, min(self.rows, 10), dtype=np.int64)
        sample = self._dataset.with_format("arrow")[places]
        return {"rows": self.rows, "sample": zlib.crc32(repr(sample.to_pylist()).encode())}


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
    ends = np.cumsum(sizes[blocks])
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left")) + 1
    skip = start - int(ends[first] - sizes[blocks[first]])
    parts = (rows for block in blocks[first:last].tolist() for rows in source.read(block))
    yield from rows_after(parts, skip, stop - start)

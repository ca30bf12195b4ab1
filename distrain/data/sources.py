"""Sources of rows: what a dataset reads from.

A :class:`TableSource` knows how many rows it has, in which blocks. A :class:`Stream` does not.
Runs in: worker; objects in the user's memory are pickled with the job.
"""

from __future__ import annotations

import copy
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from distrain.data.blocks import (
    Block,
    as_block,
    empty_column,
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
    from distrain.data.order import Indices, Span

ROWS_AT_ONCE = 1024
"""Rows that are read at a time, at most, by functions that need no batches."""
_ROWS_FROM_MEMORY = 1 << 14
_BYTES_FROM_MEMORY = 4 << 20
UNDIVIDED = "leave its name out of DataConfig(datasets_to_split=[...])"


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
        return rows_between(next(filter(row_count, self.all_blocks()), []), 0, rows)

    def all_blocks(self) -> Iterator[Block]:
        """Yield all rows, in their own order."""
        return chain.from_iterable(map(self.read, range(len(self.block_rows))))

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


# -- parts of another source -----------------------------------------------------------------------------------------


class IndexedSource(RandomSource):
    """Rows of a source that can find any row directly.

    places: turns the number of a row into its number in the other source. fact: the name of this choice.
    """

    def __init__(self, inner: TableSource, rows: int, places: Callable[[Indices], Indices], fact: str) -> None:
        super().__init__(rows)
        self._inner = inner
        self._places = places
        self._fact = fact
        self.at_once = inner.at_once

    def take(self, rows: Indices) -> Block:
        return self._inner.take(self._places(rows))

    def facts(self) -> dict[str, Any]:
        return {**self._inner.facts(), self._fact: self.rows}

    def schema(self) -> Schema:
        return self._inner.schema()


@dataclass(eq=False)
class SlicedSource(TableSource):
    """Consecutive rows of another source."""

    inner: TableSource
    span: Span

    @cached_property
    def block_rows(self) -> Indices:
        rows = self.inner.block_rows
        ends = np.cumsum(rows)
        sizes: Indices = np.clip(ends, *self.span) - np.clip(ends - rows, *self.span)
        return sizes

    @property
    def row_bytes(self) -> float:
        return self.inner.row_bytes

    def read(self, block: int) -> Iterator[Block]:
        before = max(0, self.span[0] - int(self.inner.block_rows[:block].sum()))
        return rows_after(self.inner.read(block), before, int(self.block_rows[block]))

    def schema(self) -> Schema:
        return self.inner.schema()

    def facts(self) -> dict[str, Any]:
        return {**self.inner.facts(), "slice": [*self.span]}


@dataclass(eq=False)
class RemadeSource(TableSource):
    """The rows that a function makes from those of another source. A pass over all rows counts them."""

    inner: TableSource
    function: Callable[[Block], Block]

    @cached_property
    def block_rows(self) -> Indices:
        counts = [sum(map(row_count, self.read(block))) for block in range(len(self.inner.block_rows))]
        return np.array(counts, dtype=np.int64)

    @property
    def row_bytes(self) -> float:
        return self.inner.row_bytes

    def read(self, block: int) -> Iterator[Block]:
        return map(self.function, filter(row_count, self.inner.read(block)))

    def facts(self) -> dict[str, Any]:
        return {**self.inner.facts(), "remade": self.rows}


# -- streams ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows that come one after the other. Every rank reads all of them, in each epoch from the beginning.

    make: returns the iterable of an epoch; a row is a dict, or any object.
    functions: are applied to each block in turn; they may drop rows.
    """

    make: Callable[[], Iterable[Any]]
    functions: tuple[Callable[[Block], Block], ...] = ()

    def read(self, size: int, *, epoch: int = 0, is_divided: bool = False) -> Iterator[Block]:
        """Yield all rows, at most ``size`` at once. Raises DataError for a part of what is to be divided as a whole."""
        source = self.make()
        names = [getattr(part, "__name__", None) for part in getattr(source, "pipeline", ())]  # of WebDataset
        ranks = getattr(getattr(source, "_distributed", None), "world_size", 1)  # of Hugging Face
        if is_divided and ("split_by_node" in names or ranks > 1):
            raise DataError(
                f"the stream divides itself by rank, so it must not be divided once more: {UNDIVIDED}, or have all "
                "ranks read the same rows"
            )
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        rows = iter(source)
        while block := list(islice(rows, size)):
            made: Block = block
            for function in self.functions:
                made = function(made) if row_count(made) else made
            if row_count(made):
                yield made

    def first(self, rows: int) -> Block:
        """Return some of the first rows, at most so many, and at least one if there are any."""
        return rows_between(next(self.read(rows), []), 0, rows)

    def schema(self) -> Schema:
        """Return the columns of the first row."""
        return schema_of(self.first(1))

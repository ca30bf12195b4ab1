"""Sources made of other sources: some of their rows, or their rows after a function of the user's. Runs in: worker.

The functions of the user's are :class:`Batched`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distrain.data.blocks import (
    as_block,
    formatter,
    in_pieces,
    joined,
    row_count,
    rows_after,
    rows_at,
    to_rows,
    writable,
)
from distrain.data.order import Permutation
from distrain.data.sources import ROWS_AT_ONCE, RandomSource, TableSource, schema_of
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from distrain.data.blocks import Block
    from distrain.data.order import Indices, Span
    from distrain.data.sources import Schema

    Mask = np.ndarray[Any, np.dtype[np.bool_]]

_NUMBERS_AT_ONCE = 1 << 16


class MappedSource(TableSource):
    """The rows of another source, after a function that keeps their number."""

    def __init__(self, inner: TableSource, function: Callable[[Block], Block]) -> None:
        self._inner = inner
        self._function = function
        self.is_random = inner.is_random
        self.at_once = inner.at_once

    @property
    def block_rows(self) -> Indices:
        return self._inner.block_rows

    @property
    def row_bytes(self) -> float:
        return self._inner.row_bytes

    def read(self, blocks: Sequence[int], skip: int, count: int) -> Iterator[Block]:
        return map(self._function, self._inner.read(blocks, skip, count))

    def take(self, rows: Indices) -> Block:
        return self._function(self._inner.take(rows))

    def facts(self) -> dict[str, Any]:
        return self._inner.facts()


class IndexedSource(RandomSource):
    """Rows of a source that finds any row at once. ``places`` turns a row's number into that of the source."""

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
class ChosenSource(TableSource):
    """The rows that are chosen of each block of another source.

    keeps: returns whether each of some rows, which have these numbers in the other source, is chosen.
    fact: names the choice in :meth:`facts`. value: describes it; None: the number of rows does.
    sizes: returns how many are chosen of each block, for the ends of all; None: a pass over all rows counts them.
    """

    inner: TableSource
    keeps: Callable[[Indices, Block], Mask]
    fact: str
    value: list[int] | None = None
    sizes: Callable[[Indices], Indices] | None = None

    @cached_property
    def _ends(self) -> Indices:
        """The number of the first row after each block."""
        ends: Indices = np.cumsum(self.inner.block_rows)
        return ends

    @cached_property
    def block_rows(self) -> Indices:
        if self.sizes:
            return self.sizes(self._ends)
        return _counts(self._ends, (numbers for numbers, _ in self._chosen(range(len(self._ends)))))

    @property
    def row_bytes(self) -> float:
        return self.inner.row_bytes

    def _chosen(self, blocks: Sequence[int]) -> Iterator[tuple[Indices, Block]]:
        """Yield the rows of these blocks that are kept, with their numbers."""
        sizes = self.inner.block_rows[blocks]
        ends = np.cumsum(sizes)
        shifts = self._ends[blocks] - ends
        first = 0
        for rows in self.inner.read(blocks, 0, int(sizes.sum())):
            places = np.arange(first, first + row_count(rows))
            numbers = places + shifts[np.searchsorted(ends, places, side="right")]
            kept = np.flatnonzero(self.keeps(numbers, rows))
            yield numbers[kept], rows if len(kept) == len(places) else rows_at(rows, kept)
            first += len(places)

    def read(self, blocks: Sequence[int], skip: int, count: int) -> Iterator[Block]:
        filled = [block for block in blocks if self.block_rows[block]]
        return rows_after((rows for _, rows in self._chosen(filled)), skip, count)

    def schema(self) -> Schema:
        return self.inner.schema()

    def facts(self) -> dict[str, Any]:
        return {**self.inner.facts(), self.fact: self.rows if self.value is None else self.value}


@dataclass(eq=False)
class RemadeSource(TableSource):
    """The rows that a function makes of those of another source. It counts them in a pass over all rows."""

    inner: TableSource
    function: Callable[[Block], Block]

    @cached_property
    def _places(self) -> list[tuple[list[int], int, int]]:
        """The arguments of :meth:`read` for each block. A source that finds any row is cut because it is one block."""
        if not self.inner.is_random:
            return [([block], 0, int(rows)) for block, rows in enumerate(self.inner.block_rows)]
        rows = self.inner.rows
        return [([0], start, min(ROWS_AT_ONCE, rows - start)) for start in range(0, rows, ROWS_AT_ONCE)]

    def _made(self, blocks: Iterable[int]) -> Iterator[Block]:
        found = (self.function(rows) for block in blocks for rows in self.inner.read(*self._places[block]))
        return (rows for rows in found if row_count(rows))

    @cached_property
    def block_rows(self) -> Indices:
        counts = [sum(map(row_count, self._made([block]))) for block in range(len(self._places))]
        return np.array(counts, dtype=np.int64)

    @property
    def row_bytes(self) -> float:
        return self.inner.row_bytes

    def read(self, blocks: Sequence[int], skip: int, count: int) -> Iterator[Block]:
        return rows_after(self._made(block for block in blocks if self.block_rows[block]), skip, count)

    def schema(self) -> Schema:
        return schema_of(next(self._made(range(len(self._places))), []))

    def facts(self) -> dict[str, Any]:
        return {**self.inner.facts(), "remade": self.rows}


def keeps(function: Callable[[Any], bool], rows: Block) -> Mask:
    """Return whether a function of the user's keeps each row."""
    return np.fromiter((bool(function(row)) for row in to_rows(rows)), dtype=np.bool_, count=row_count(rows))


# -- the operations of a dataset -------------------------------------------------------------------------------------


def filtered(source: TableSource, function: Callable[[Any], bool]) -> TableSource:
    """Return the rows for which the function returns True."""
    if not source.is_random:
        return ChosenSource(source, lambda numbers, rows: keeps(function, rows), "filtered")
    masks = [keeps(function, rows) for rows in source.read([0], 0, source.rows)]
    kept = np.flatnonzero(np.concatenate(masks)) if masks else np.arange(0)
    return IndexedSource(source, len(kept), lambda rows: kept[rows], "filtered")


def part(source: TableSource, span: Span, seed: int | None) -> TableSource:
    """Return some rows. ``seed``: of the random order in which they are counted; None: they are in their own order.

    Parts with other places in the same order have other rows.
    """
    size, (start, stop) = source.rows, span
    order = (lambda numbers: numbers) if seed is None else Permutation(size, seed, "split")
    if source.is_random:
        fact = f"from {start}" if seed is None else f"split {seed} from {start}"
        return IndexedSource(source, stop - start, lambda rows: order(rows + start), fact)

    def is_inside(numbers: Indices, rows: Block = None) -> Mask:
        places = order(numbers)
        return (places >= start) & (places < stop)

    def sizes(ends: Indices) -> Indices:
        if seed is None:
            inside: Indices = np.clip(ends, start, stop)
            return np.append(inside[:1] - start, inside[1:] - inside[:-1])
        some = (np.arange(first, min(size, first + _NUMBERS_AT_ONCE)) for first in range(0, size, _NUMBERS_AT_ONCE))
        return _counts(ends, (numbers[is_inside(numbers)] for numbers in some))

    fact, value = ("slice", [start, stop]) if seed is None else ("split", [start, stop, seed])
    return ChosenSource(source, is_inside, fact, value, sizes)


def _counts(ends: Indices, numbers: Iterable[Indices]) -> Indices:
    """Return how many of these numbers of rows are in each of the blocks that have these ends."""
    counts = np.zeros(len(ends), dtype=np.int64)
    for some in numbers:
        np.add.at(counts, np.searchsorted(ends, some, side="right"), 1)
    return counts


def span_of_split(rows: int, *, size: float, test: bool) -> Span:
    """Return one of the two spans of ``train_test_split()``. Raises DataError if one of them would be empty."""
    count = round(rows * size) if isinstance(size, float) else size
    if not 0 < count < rows:
        raise DataError(
            f"train_test_split(): the dataset has {rows} rows, so {count} of them cannot be set aside for tests"
        )
    return (rows - count, rows) if test else (0, rows - count)


# -- functions of the user's -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batched:
    """A function of the user's for blocks.

    name: of the method that it was given to, for error messages.
    batch_size: the most rows of a call; None: those of the block.
    keeps_rows: it returns as many rows as it gets; None: the first rows tell, see :meth:`keeps`.
    """

    function: Callable[[Block], Any]
    name: str
    batch_size: int | None = None
    keeps_rows: bool | None = True

    def keeps(self, first: Block) -> bool:
        """Return whether it returns as many rows as these."""
        return not row_count(first) or row_count(as_block(self.function(first), self.name)) == row_count(first)

    def __call__(self, block: Block) -> Block:
        """Return the rows that the function makes of these. Raises DataError for more or fewer than it may return."""
        pieces = in_pieces([block], self.batch_size) if self.batch_size else [block]
        return joined([self._call(piece) for piece in pieces])

    def _call(self, piece: Block) -> Block:
        made = as_block(self.function(piece), self.name)
        if self.keeps_rows and row_count(made) != row_count(piece):
            raise DataError(
                f"{self.name} returned {row_count(made)} rows for {row_count(piece)}; it must keep the number of "
                "rows, so that all ranks get equally many batches. Use filter() to drop rows, flat_map(), or "
                "map_batches(keeps_rows=False), which is udf_modifying_row_count=True in a script of Ray's."
            )
        return made


class Constructed:
    """A function that is an instance of a class of the user's, which is constructed at the first call."""

    def __init__(self, kind: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._make = partial(kind, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make}

    @cached_property
    def _function(self) -> Callable[..., Any]:
        made: Callable[..., Any] = self._make()
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def for_batches(
    function: Callable[[Any], Any], batch_size: int | None, batch_format: str | None, *, keeps_rows: bool | None = True
) -> Batched:
    """Return the function of ``map_batches()``."""
    to_format = formatter(batch_format)

    def mapped(block: Block) -> Any:
        return function(writable(to_format(block)))

    return Batched(mapped, "map_batches()", batch_size, keeps_rows)


def for_rows(function: Callable[[Any], Any]) -> Batched:
    """Return the function of ``map()``."""

    def mapped(block: Block) -> list[Any]:
        rows = [_as_row(function(row)) for row in to_rows(block)]
        if any(row is None for row in rows):
            raise DataError("map(): the function returned None for a row; it must return the new row")
        return rows

    return Batched(mapped, "map()")


def _as_row(made: Any) -> Any:
    """Return what a function has returned for a row; a dict for any other mapping, such as a tokenizer's."""
    return dict(made) if isinstance(made, Mapping) else made


def for_lists(function: Callable[[Any], Iterable[Any]]) -> Batched:
    """Return the function of ``flat_map()``."""
    return Batched(
        lambda block: [_as_row(made) for row in to_rows(block) for made in function(row)],
        "flat_map()",
        keeps_rows=False,
    )

"""Sources made of other sources: some of their rows, or their rows after a function of the user's. Runs in: worker.

The functions of the user's are :class:`Batched`.
"""

from __future__ import annotations

from abc import abstractmethod
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
        self.inner = inner
        self.function = function
        self.is_random = inner.is_random
        self.at_once = inner.at_once

    @property
    def block_rows(self) -> Indices:
        return self.inner.block_rows

    @property
    def rows(self) -> int:
        return self.inner.rows

    @property
    def row_bytes(self) -> float:
        return self.inner.row_bytes

    def read(self, blocks: Sequence[int], skip: int, count: int) -> Iterator[Block]:
        return map(self.function, self.inner.read(blocks, skip, count))

    def take(self, rows: Indices) -> Block:
        return self.function(self.inner.take(rows))

    def facts(self) -> dict[str, Any]:
        return self.inner.facts()


class IndexedSource(RandomSource):
    """Rows of a source that finds any row at once. ``places`` turns a row's number into that of the source."""

    def __init__(self, inner: TableSource, rows: int, places: Callable[[Indices], Indices], facts: str) -> None:
        super().__init__(rows)
        self._inner = inner
        self._places = places
        self._facts = facts
        self.at_once = inner.at_once

    def take(self, rows: Indices) -> Block:
        return self._inner.take(self._places(rows))

    def facts(self) -> dict[str, Any]:
        return {**self._inner.facts(), self._facts: self.rows}

    def schema(self) -> Schema:
        return self._inner.schema()


class DerivedSource(TableSource):
    """Some rows of each block of another source."""

    def __init__(self, inner: TableSource) -> None:
        self._inner = inner

    @property
    def row_bytes(self) -> float:
        return self._inner.row_bytes

    def schema(self) -> Schema:
        return self._inner.schema()

    @abstractmethod
    def _made(self, blocks: Sequence[int]) -> Iterator[Block]:
        """Yield all rows of these blocks."""

    def read(self, blocks: Sequence[int], skip: int, count: int) -> Iterator[Block]:
        return rows_after(self._made([block for block in blocks if self.block_rows[block]]), skip, count)


class ChosenSource(DerivedSource):
    """The rows of each block of another source that :meth:`_kept` chooses."""

    @abstractmethod
    def _kept(self, numbers: Indices, rows: Block) -> Mask:
        """Return whether each of the rows, which have these numbers in the other source, is kept."""

    @cached_property
    def _ends(self) -> Indices:
        """The number of the first row after each block."""
        ends: Indices = np.cumsum(self._inner.block_rows)
        return ends

    def _counts(self, kept: Iterable[Indices]) -> Indices:
        """Return how many rows of each block are kept. ``kept``: the numbers of all that are."""
        counts = np.zeros(len(self._ends), dtype=np.int64)
        for numbers in kept:
            np.add.at(counts, np.searchsorted(self._ends, numbers, side="right"), 1)
        return counts

    def _chosen(self, blocks: Sequence[int]) -> Iterator[tuple[Indices, Block]]:
        """Yield the rows of these blocks that are kept, with their numbers."""
        sizes = self._inner.block_rows[blocks]
        ends = np.cumsum(sizes)
        shifts = self._ends[blocks] - ends
        first = 0
        for rows in self._inner.read(blocks, 0, int(sizes.sum())):
            places = np.arange(first, first + row_count(rows))
            numbers = places + shifts[np.searchsorted(ends, places, side="right")]
            kept = np.flatnonzero(self._kept(numbers, rows))
            yield numbers[kept], rows if len(kept) == len(places) else rows_at(rows, kept)
            first += len(places)

    def _made(self, blocks: Sequence[int]) -> Iterator[Block]:
        return (rows for _, rows in self._chosen(blocks))


class SlicedSource(ChosenSource):
    """The rows of another source from ``start`` up to ``stop``."""

    def __init__(self, inner: TableSource, span: Span) -> None:
        super().__init__(inner)
        self._span = span

    @cached_property
    def block_rows(self) -> Indices:
        starts = self._ends - self._inner.block_rows
        sizes: Indices = np.clip(self._ends, *self._span) - np.clip(starts, *self._span)
        return sizes

    def _kept(self, numbers: Indices, rows: Block) -> Mask:
        return (numbers >= self._span[0]) & (numbers < self._span[1])

    def facts(self) -> dict[str, Any]:
        return {**self._inner.facts(), "slice": list(self._span)}


class FilteredSource(ChosenSource):
    """The rows for which a function of the user's returns True. It counts them in a pass over all rows."""

    def __init__(self, inner: TableSource, function: Callable[[Any], bool]) -> None:
        super().__init__(inner)
        self._function = function

    @cached_property
    def block_rows(self) -> Indices:
        return self._counts(numbers for numbers, _ in self._chosen(range(len(self._ends))))

    def _kept(self, numbers: Indices, rows: Block) -> Mask:
        return keeps(self._function, rows)

    def facts(self) -> dict[str, Any]:
        return {**self._inner.facts(), "filtered": self.rows}


class SplitSource(SlicedSource):
    """A random part of the rows: those whose place in a random order is in ``span``."""

    def __init__(self, inner: TableSource, span: Span, seed: int) -> None:
        super().__init__(inner, span)
        self._seed = seed

    @cached_property
    def block_rows(self) -> Indices:
        starts = range(0, self._inner.rows, _NUMBERS_AT_ONCE)
        numbers = (np.arange(start, min(self._inner.rows, start + _NUMBERS_AT_ONCE)) for start in starts)
        return self._counts(some[self._kept(some, None)] for some in numbers)

    def _kept(self, numbers: Indices, rows: Block) -> Mask:
        return super()._kept(Permutation(self._inner.rows, self._seed, "split")(numbers), rows)

    def facts(self) -> dict[str, Any]:
        return {**self._inner.facts(), "split": [*self._span, self._seed]}


class RemadeSource(DerivedSource):
    """The rows that a function makes of those of another source. It counts them in a pass over all rows."""

    def __init__(self, inner: TableSource, function: Callable[[Block], Block]) -> None:
        super().__init__(inner)
        self._function = function

    @cached_property
    def _places(self) -> list[tuple[list[int], int, int]]:
        """The arguments of :meth:`read` for each block. A source that finds any row is cut because it is one block."""
        if not self._inner.is_random:
            return [([block], 0, int(rows)) for block, rows in enumerate(self._inner.block_rows)]
        rows = self._inner.rows
        return [([0], start, min(ROWS_AT_ONCE, rows - start)) for start in range(0, rows, ROWS_AT_ONCE)]

    def _made(self, blocks: Sequence[int]) -> Iterator[Block]:
        found = (self._function(rows) for block in blocks for rows in self._inner.read(*self._places[block]))
        return (rows for rows in found if row_count(rows))

    @cached_property
    def block_rows(self) -> Indices:
        counts = [sum(map(row_count, self._made([block]))) for block in range(len(self._places))]
        return np.array(counts, dtype=np.int64)

    def schema(self) -> Schema:
        return schema_of(next(self._made(range(len(self._places))), []))

    def facts(self) -> dict[str, Any]:
        return {**self._inner.facts(), "remade": self.rows}


def keeps(function: Callable[[Any], bool], rows: Block) -> Mask:
    """Return whether a function of the user's keeps each row."""
    return np.fromiter((bool(function(row)) for row in to_rows(rows)), dtype=np.bool_, count=row_count(rows))


# -- the operations of a dataset -------------------------------------------------------------------------------------


def filtered(source: TableSource, function: Callable[[Any], bool]) -> TableSource:
    """Return the rows for which the function returns True."""
    if not source.is_random:
        return FilteredSource(source, function)
    masks = [keeps(function, rows) for rows in source.read([0], 0, source.rows)]
    kept = np.flatnonzero(np.concatenate(masks)) if masks else np.arange(0)
    return IndexedSource(source, len(kept), lambda rows: kept[rows], "filtered")


def part(source: TableSource, *, span_of: Callable[[int], Span], seed: int | None) -> TableSource:
    """Return some rows. ``seed``: of the random order in which they are counted; None: they are in their own order.

    Parts with other places in the same order have other rows.
    """
    start, stop = span = span_of(source.rows)
    if not source.is_random:
        return SlicedSource(source, span) if seed is None else SplitSource(source, span, seed)
    if seed is None:
        return IndexedSource(source, stop - start, lambda rows: rows + start, f"from {start}")
    order = Permutation(source.rows, seed, "split")
    return IndexedSource(source, stop - start, lambda rows: order(rows + start), f"split {seed} from {start}")


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
        if self.keeps_rows is not False and row_count(made) != row_count(piece):
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

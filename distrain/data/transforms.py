"""Datasets on the worker, with rows that are selected or changed. Runs in: worker.

The user's functions are :class:`Batched`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distrain.data.blocks import (
    as_block,
    in_pieces,
    joined,
    kept_rows,
    row_count,
    rows_at,
    to_rows,
)
from distrain.data.order import Permutation, RowOrder
from distrain.data.sources import RandomSource, TableSource, schema_of
from distrain.data.streams import Stream
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distrain.data.blocks import Block
    from distrain.data.order import Indices, Span
    from distrain.data.sources import Schema

_NUMBERS_AT_ONCE = 1 << 16
_ROWS_TO_TRY = 128
"""Rows that show whether the user's function changes their number."""


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
    """The rows of another source whose places in an order are in a span.

    seed: of the order; None: the order of the source.
    """

    inner: TableSource
    span: Span
    seed: int | None

    @cached_property
    def _order(self) -> Callable[[Indices], Indices]:
        return _order_of_parts(self.inner.rows, self.seed)

    def _chosen(self, first: int, end: int) -> Indices:
        """Return which of these rows are in the span, counted from ``first``."""
        places = self._order(np.arange(first, end))
        found: Indices = np.flatnonzero((places >= self.span[0]) & (places < self.span[1]))
        return found

    @cached_property
    def block_rows(self) -> Indices:
        ends = np.cumsum(self.inner.block_rows)
        starts = ends - self.inner.block_rows
        if self.seed is None:
            sizes: Indices = np.clip(ends, *self.span) - np.clip(starts, *self.span)
            return sizes
        return np.array([self._count(*block) for block in zip(starts, ends, strict=True)], dtype=np.int64)

    def _count(self, start: int, end: int) -> int:
        firsts = range(start, end, _NUMBERS_AT_ONCE)
        return sum(len(self._chosen(first, min(first + _NUMBERS_AT_ONCE, end))) for first in firsts)

    @property
    def row_bytes(self) -> float:
        return self.inner.row_bytes

    def read(self, block: int) -> Iterator[Block]:
        first = int(self.inner.block_rows[:block].sum())
        for rows in self.inner.read(block):
            end = first + row_count(rows)
            kept = self._chosen(first, end)
            if len(kept):
                yield rows_at(rows, kept)
            first = end

    def schema(self) -> Schema:
        return self.inner.schema()

    def facts(self) -> dict[str, Any]:
        choice = {"slice": [*self.span]} if self.seed is None else {"split": [*self.span, self.seed]}
        return {**self.inner.facts(), **choice}


@dataclass(eq=False)
class RemadeSource(TableSource):
    """The rows that a function makes from those of another source. A pass over all rows counts them.

    columns: returns the columns, if the function may leave out all rows; None: the first row has them.
    """

    inner: TableSource
    function: Callable[[Block], Block]
    columns: Callable[[], Schema] | None = None

    @cached_property
    def block_rows(self) -> Indices:
        counts = [sum(map(row_count, self.read(block))) for block in range(len(self.inner.block_rows))]
        return np.array(counts, dtype=np.int64)

    @property
    def row_bytes(self) -> float:
        return self.inner.row_bytes

    def read(self, block: int) -> Iterator[Block]:
        return map(self.function, filter(row_count, self.inner.read(block)))

    def schema(self) -> Schema:
        return self.columns() if self.columns else super().schema()

    def facts(self) -> dict[str, Any]:
        return {**self.inner.facts(), "filtered" if self.columns else "remade": self.rows}


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


def as_row(made: Any) -> Any:
    """Return what a function has returned for a row; a dict for any other mapping, such as a tokenizer's."""
    if made is None:
        raise DataError("map() or flat_map(): the function returned None for a row; it must return the new row")
    return dict(made) if isinstance(made, Mapping) else made


# -- what users do with a dataset ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenDataset:
    """A dataset on the worker.

    functions: applied to each batch, in turn. They keep the number of rows.
    """

    source: TableSource | Stream
    functions: tuple[Callable[[Block], Block], ...] = ()
    order: RowOrder = field(default_factory=RowOrder)

    def finished(self, block: Block) -> Block:
        """Return rows of the source with the functions applied."""
        for function in self.functions:
            block = function(block)
        return block

    def first(self, rows: int) -> Block:
        """Return some of the first rows; if there are none, a block without rows, with columns if they are known."""
        found = self.source.first(rows)
        if row_count(found):
            return self.finished(found)
        return [] if self.functions else self.source.schema().no_rows()

    def schema(self) -> Schema:
        """Return the columns, with the functions applied."""
        return schema_of(self.first(1)) if self.functions else self.source.schema()

    def mapped(self, function: Batched) -> OpenDataset:
        """Apply a function to each batch, or to all rows beforehand if it changes their number."""
        keeps_rows = function.keeps_rows
        if keeps_rows is None:
            keeps_rows = isinstance(self.source, Stream) or function.keeps(self.first(_ROWS_TO_TRY))
        changed = self._with(replace(function, keeps_rows=keeps_rows))
        if keeps_rows:
            return changed
        if isinstance(self.source, Stream):
            raise _no_row_count("change the number of its rows before you pass it to distrain")
        return OpenDataset(RemadeSource(self.source, changed.finished), (), self.order)

    def filtered(self, function: Callable[[Any], bool]) -> OpenDataset:
        """Keep the rows for which a function returns True."""
        source, kept = self.source, self._with(partial(kept_rows, function=function))
        if isinstance(source, Stream):
            return OpenDataset(replace(source, functions=(*source.functions, *kept.functions)), (), self.order)
        if not source.is_random:
            return OpenDataset(RemadeSource(source, kept.finished, self.schema), (), self.order)
        blocks = (block for number in range(len(source.block_rows)) for block in source.read(number))
        rows = (row for block in blocks for row in to_rows(self.finished(block)))
        places = np.fromiter((place for place, row in enumerate(rows) if function(row)), dtype=np.int64)
        return replace(self, source=IndexedSource(source, len(places), lambda numbers: places[numbers], "filtered"))

    def part(self, span_of: Callable[[int], Span], seed: int | None) -> OpenDataset:
        """Keep the rows of a span that depends on their number.

        seed: of the random order in which they are counted; None: their own order. Parts with different places in the
            same order have different rows.
        """
        if isinstance(self.source, Stream):
            raise _no_row_count("choose its rows before you pass it to distrain, as with take() and skip() of datasets")
        span = start, stop = span_of(self.source.rows)
        if not self.source.is_random:
            return replace(self, source=SlicedSource(self.source, span, seed))
        order, source = _order_of_parts(self.source.rows, seed), self.source
        fact = f"from {start}" if seed is None else f"split {seed} from {start}"
        return replace(self, source=IndexedSource(source, stop - start, lambda numbers: order(numbers + start), fact))

    def _with(self, function: Callable[[Block], Block]) -> OpenDataset:
        return replace(self, functions=(*self.functions, function))


def _order_of_parts(rows: int, seed: int | None) -> Callable[[Indices], Indices]:
    """Return the order in which the rows of parts are counted."""
    return (lambda numbers: numbers) if seed is None else Permutation(rows, seed, "split")


def _no_row_count(advice: str) -> DataError:
    return DataError(f"a stream does not know the number of its rows: {advice}")


def span_of_split(rows: int, *, size: float, test: bool) -> Span:
    """Return one of the two spans of ``train_test_split()``. Raises DataError if one of them would be empty."""
    count = round(rows * size) if isinstance(size, float) else size
    if not 0 < count < rows:
        raise DataError(
            f"train_test_split(): the dataset has {rows} rows, so {count} of them cannot be set aside for tests"
        )
    return (rows - count, rows) if test else (0, rows - count)

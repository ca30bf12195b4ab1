"""Blocks: some rows of a dataset, in the form in which the source has them. Runs in: worker.

A block is a pyarrow Table, a dict of numpy arrays of equal length, or a list of rows. A row is a dict, or any object.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distrain.errors import DataError
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Block = Any
"""A ``pyarrow.Table``, a ``dict[str, numpy.ndarray]`` or a ``list`` of rows."""
Columns = dict[str, "np.ndarray[Any, Any]"]

ITEM = "item"
"""The name of the column that holds rows which are no dicts."""


def row_count(block: Block) -> int:
    """Return the number of rows."""
    if isinstance(block, dict):
        return len(next(iter(block.values()))) if block else 0
    return block.num_rows if _is_table(block) else len(block)


def rows_between(block: Block, start: int, stop: int) -> Block:
    """Return the rows from ``start`` up to ``stop``, without a copy if the form allows it."""
    if isinstance(block, dict):
        return {name: column[start:stop] for name, column in block.items()}
    return block.slice(start, stop - start) if _is_table(block) else block[start:stop]


def rows_at(block: Block, places: np.ndarray[Any, Any]) -> Block:
    """Return copies of the rows at these places, in this order."""
    if isinstance(block, dict):
        return {name: column[places] for name, column in block.items()}
    return block.take(places) if _is_table(block) else [block[place] for place in places]


def joined(blocks: Sequence[Block]) -> Block:
    """Return the rows of several blocks as one. Raises DataError if their columns differ."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    if isinstance(first, list):
        return [row for block in blocks for row in block]
    if _is_table(first):
        return require("pyarrow").concat_tables(blocks)
    for block in blocks:
        if block.keys() != first.keys():
            raise DataError(f"some rows have the columns {sorted(first)}, and others {sorted(block)}")
    return {name: np.concatenate([block[name] for block in blocks]) for name in first}


def in_pieces(blocks: Iterable[Block], size: int) -> Iterator[Block]:
    """Yield the same rows in blocks of ``size`` rows; the last block may have fewer."""
    kept: list[Block] = []
    count = 0
    for block in blocks:
        start, end = 0, row_count(block)
        while count + end - start >= size:
            stop = start + size - count
            kept.append(rows_between(block, start, stop))
            yield joined(kept)
            kept, count, start = [], 0, stop
        if start < end:
            kept.append(rows_between(block, start, end))
            count += end - start
    if kept:
        yield joined(kept)


# -- from and to what users have -------------------------------------------------------------------------------------


def as_block(value: Any, source: str) -> Block:
    """Return what a function of the user's has returned as a block. Raises DataError, with ``source`` in its text."""
    if isinstance(value, list) or _is_table(value):
        return value
    if is_instance(value, "pandas", "DataFrame"):
        return {str(name): _from_series(value[name]) for name in value.columns}
    if not isinstance(value, Mapping):
        raise DataError(
            f"{source} must return a dict of arrays, a pyarrow Table or a pandas DataFrame, "
            f"got {type(value).__module__}.{type(value).__qualname__}"
        )
    block = {str(name): _column(values) for name, values in value.items()}
    if single := [name for name, column in block.items() if not column.ndim]:
        raise DataError(f"{source}: column {single[0]!r} is one value; it must be an array with a value for each row")
    lengths = {name: len(column) for name, column in block.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{source} returned columns of different lengths: {lengths}")
    return block


def to_columns(block: Block) -> Columns:
    """Return a dict of numpy arrays. Lists of equal length become arrays of more dimensions, others objects."""
    if isinstance(block, dict):
        return block
    if _is_table(block):
        return {name: _from_arrow(block.column(name)) for name in block.column_names}
    if not block or not isinstance(block[0], dict):
        return {ITEM: _column(block)}
    names = block[0].keys()
    for row in block:
        if not isinstance(row, dict):
            raise DataError(f"some rows are dicts, but one is {row!r:.50}")
        if row.keys() != names:
            raise DataError(f"some rows have the columns {sorted(names)}, and others {sorted(row)}")
    return {name: _column([row[name] for row in block]) for name in names}


def writable(batch: Any) -> Any:
    """Return a batch whose arrays may be changed; those that belong to Arrow are copied."""
    if not isinstance(batch, dict):
        return batch
    return {name: column if column.flags.writeable else column.copy() for name, column in batch.items()}


def to_rows(block: Block) -> list[Any]:
    """Return a list of the rows; dicts, unless the source has other objects."""
    if isinstance(block, list):
        return block
    columns = to_columns(block)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def to_table(block: Block) -> Any:
    """Return a pyarrow Table."""
    pa = require("pyarrow")
    if _is_table(block):
        return block
    return pa.table({name: pa.array(list(column)) for name, column in to_columns(block).items()})


def to_frame(block: Block) -> Any:
    """Return a pandas DataFrame."""
    if _is_table(block):
        return block.to_pandas()
    columns = {n: c if c.ndim == 1 else list(c) for n, c in to_columns(block).items()}
    return require("pandas").DataFrame(columns)


FORMATS: dict[str | None, Callable[[Block], Any]] = {
    "default": to_columns,
    "numpy": to_columns,
    "pandas": to_frame,
    "pyarrow": to_table,
}


def formatter(batch_format: str | None) -> Callable[[Block], Any]:
    """Return the function that brings a block into a format that the user names. Raises ValueError."""
    try:
        return FORMATS[batch_format or "default"]
    except KeyError:
        raise ValueError(f"batch_format must be one of {', '.join(map(repr, FORMATS))}, got {batch_format!r}") from None


def _column(values: Any) -> np.ndarray[Any, Any]:
    """Return values as an array; of objects if they have different shapes."""
    if isinstance(values, np.ndarray) or not hasattr(values, "__len__"):
        return np.asarray(values)
    if is_instance(values, "torch", "Tensor"):
        values = values.detach().cpu()
    try:
        if len(values) and is_instance(values[0], "torch", "Tensor"):
            return np.stack([value.detach().cpu().numpy() for value in values])
        column = np.asarray(values)
    except (ValueError, TypeError):
        column = None
    if column is not None and column.ndim and column.dtype != object:
        return column
    objects = np.empty(len(values), dtype=object)
    objects[:] = list(values)
    return objects


def _from_series(column: Any) -> np.ndarray[Any, Any]:
    """Return a column of pandas as an array. Missing integers become None in an array of objects."""
    if column.dtype.kind in "iub" and column.isna().any():
        return np.array([None if gap else value for gap, value in zip(column.isna(), column, strict=True)], object)
    return np.asarray(column.to_numpy())


def _from_arrow(column: Any) -> np.ndarray[Any, Any]:
    """Return an Arrow column as an array. Nulls among floats become NaN, others None in an array of objects."""
    pa = require("pyarrow")
    column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(column, pa.ExtensionArray):
        if hasattr(column, "to_numpy_ndarray"):
            return np.asarray(column.to_numpy_ndarray())
        column = column.storage
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
    elif pa.types.is_integer(kind) and column.null_count:  # as floats, large numbers would change
        return np.array(column.to_pylist(), dtype=object)
    elif pa.types.is_fixed_size_list(kind) and not column.null_count:
        inner = _from_arrow(pa.chunked_array([column.flatten()]))
        return inner.reshape(len(column), kind.list_size, *inner.shape[1:])
    elif (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and not column.null_count and len(column):
        lengths = np.diff(column.offsets.to_numpy())
        if (lengths == lengths[0]).all():
            inner = _from_arrow(pa.chunked_array([column.flatten()]))
            return inner.reshape(len(column), lengths[0], *inner.shape[1:])
    return np.asarray(column.to_numpy(zero_copy_only=False))


# -- functions of the user's -----------------------------------------------------------------------------------------


class Batched:
    """A function of the user's for blocks.

    keeps_rows: it returns as many rows as it gets; None: the first rows tell, see :meth:`keeps`.
    """

    def __init__(
        self, function: Callable[[Block], Any], name: str, batch_size: int | None, *, keeps_rows: bool | None = True
    ) -> None:
        self.keeps_rows = keeps_rows
        self._function = function
        self._name = name
        self._batch_size = batch_size

    def keeps(self, first: Block) -> bool:
        """Return whether it returns as many rows as these."""
        return not row_count(first) or row_count(as_block(self._function(first), self._name)) == row_count(first)

    def making_rows(self) -> Batched:
        """Return the same function, which may return any number of rows."""
        return Batched(self._function, self._name, self._batch_size, keeps_rows=False)

    def __call__(self, block: Block) -> Block:
        """Return the rows that the function makes of these. Raises DataError for more or fewer than it may return."""
        pieces = in_pieces([block], self._batch_size) if self._batch_size else [block]
        made = [self._call(piece) for piece in pieces]
        made = [piece for piece in made if row_count(piece)] or made[:1]
        if len(made) == 1:
            return made[0]
        names = to_columns(made[0]).keys()
        columns = [to_columns(piece) for piece in made]
        return {name: np.concatenate([column[name] for column in columns]) for name in names}

    def _call(self, piece: Block) -> Block:
        made = as_block(self._function(piece), self._name)
        if self.keeps_rows is not False and row_count(made) != row_count(piece):
            raise DataError(
                f"{self._name} returned {row_count(made)} rows for {row_count(piece)}; it must keep the number of "
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
    function: Callable[..., Any],
    batch_size: int | None,
    batch_format: str | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    keeps_rows: bool | None = True,
) -> Batched:
    """Return the function of ``map_batches()``."""
    to_format = formatter(batch_format)

    def mapped(block: Block) -> Any:
        return function(writable(to_format(block)), *args, **kwargs)

    return Batched(mapped, "map_batches()", batch_size, keeps_rows=keeps_rows)


def for_rows(function: Callable[[Any], Any]) -> Batched:
    """Return the function of ``map()``."""

    def mapped(block: Block) -> list[Any]:
        rows = [function(row) for row in to_rows(block)]
        if any(row is None for row in rows):
            raise DataError("map(): the function returned None for a row; it must return the new row")
        return rows

    return Batched(mapped, "map()", None)


def for_lists(function: Callable[[Any], Iterable[Any]]) -> Batched:
    """Return the function of ``flat_map()``."""
    return Batched(
        lambda block: [made for row in to_rows(block) for made in function(row)], "flat_map()", None, keeps_rows=False
    )


# -- kinds of objects, without importing their packages --------------------------------------------------------------


def is_instance(value: object, module: str, name: str) -> bool:
    """Return whether ``value`` is an instance of a class of a package that may not be imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _is_table(value: object) -> bool:
    return is_instance(value, "pyarrow", "Table")

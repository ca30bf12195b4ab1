"""Blocks: some rows of a dataset, in the form in which the source has them. Runs in: worker.

A block is a pyarrow Table, a dict of numpy arrays of equal length, or a list of rows. A row is a dict, or any object.
"""

from __future__ import annotations

import sys
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
    if not isinstance(value, dict):
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


# -- kinds of objects, without importing their packages --------------------------------------------------------------


def is_instance(value: object, module: str, name: str) -> bool:
    """Return whether ``value`` is an instance of a class of a package that may not be imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _is_table(value: object) -> bool:
    return is_instance(value, "pyarrow", "Table")

"""Blocks: some rows of a dataset, in the form in which the source has them. Runs in: worker.

A block is a pyarrow Table, a dict of numpy arrays of equal length, or a list of rows. A row is a dict, or any object.

No conversion changes a value. Numbers of one kind, and rows of one shape, are an array; a missing float or time is NaN
or NaT. All else is an array of objects: text, bytes, integers with gaps, times with a zone, rows of different shapes,
mixtures. In users' batches, integers with gaps are floats. What the target cannot hold raises DataError with the
column's name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from distrain.errors import DataError
from distrain.system.arguments import check_choice
from distrain.system.imports import require

_T = TypeVar("_T")
Block = Any
"""A ``pyarrow.Table``, a ``dict[str, numpy.ndarray]`` or a ``list`` of rows."""
Columns = dict[str, "np.ndarray[Any, Any]"]

ITEM = "item"
"""The name of the column that holds rows which aren't dicts."""
_CANNOT = (TypeError, ValueError, OverflowError, NotImplementedError)
"""The errors of numpy and pyarrow for values that a type cannot hold."""


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
    if not _is_table(block):
        return [block[place] for place in places]
    try:
        return block.take(places)
    except NotImplementedError:  # string_view is one of the types that Arrow cannot take rows of
        return rows_at(to_columns(block), places)


def kept_rows(block: Block, function: Callable[[Any], bool]) -> Block:
    """Return the rows for which the user's function returns True."""
    kept = [place for place, row in enumerate(to_rows(block)) if function(row)]
    return block if len(kept) == row_count(block) else rows_at(block, np.array(kept, dtype=np.int64))


def joined(blocks: Sequence[Block]) -> Block:
    """Return the rows of several blocks as one. Raises DataError if their columns differ."""
    found = [block for block in blocks if row_count(block)] or [*blocks[:1]] or [[]]
    first = found[0]
    if len(found) == 1:
        return first
    if all(isinstance(block, list) for block in found):
        return [row for block in found for row in block]
    if all(_is_table(block) and block.schema == first.schema for block in found):
        return require("pyarrow").concat_tables(found)
    parts = [to_columns(block) for block in found]
    for part in parts:
        if part.keys() != parts[0].keys():
            raise DataError(f"some rows have the columns {sorted(parts[0])}, others {sorted(part)}; give all the same")
    return {name: _joined_columns([part[name] for part in parts]) for name in parts[0]}


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


def rows_after(blocks: Iterable[Block], skip: int, count: int) -> Iterator[Block]:
    """Yield ``count`` rows of these blocks after the first ``skip`` ones."""
    found = iter(blocks)
    while count and (rows := next(found, None)) is not None:
        start, end = min(skip, row_count(rows)), min(row_count(rows), skip + count)
        skip -= start
        if start < end:
            yield rows_between(rows, start, end)
            count -= end - start


# -- from and to what users have -------------------------------------------------------------------------------------


def as_block(value: Any, source: str) -> Block:
    """Return what a function of the user's has returned as a block. Raises DataError, with ``source`` in its text."""
    if isinstance(value, list) or _is_table(value):
        return value
    if not isinstance(value, Mapping) and not is_instance(value, "pandas", "DataFrame"):
        raise DataError(
            f"{source} must return a dict of arrays, a pyarrow Table or a pandas DataFrame, "
            f"got {type(value).__module__}.{type(value).__qualname__}"
        )
    names = _distinct([str(name) for name, _ in value.items()], f"{source}: ")
    named = zip(names, (column for _, column in value.items()), strict=True)
    block = _each_column(named, column_of, "an array")
    lengths = {name: len(column) if column.ndim else "one value" for name, column in block.items()}
    if "one value" in lengths.values() or len({*lengths.values()}) > 1:
        raise DataError(f"{source}: columns must be arrays of one length, with a value for each row, but are {lengths}")
    return block


def to_columns(block: Block) -> Columns:
    """Return a dict of numpy arrays. Rows of equal shape become arrays of more dimensions, others objects."""
    if isinstance(block, dict):
        return {name: column_of(column) if column.dtype.hasobject else column for name, column in block.items()}
    if _is_table(block):
        named = zip(_distinct(block.column_names), block.columns, strict=True)
        return _each_column(named, _from_arrow, "an array")
    if not block or not isinstance(block[0], dict):
        return _each_column([(ITEM, block)], _of_values, "an array") if block else {}
    names = block[0].keys()
    for row in block:
        if not isinstance(row, dict):
            raise DataError(f"some rows are dicts, but one is {row!r:.50}")
        if row.keys() != names:
            raise DataError(f"some rows have the columns {sorted(names)}, others {sorted(row)}; give all the same")
    return _each_column(((name, [row[name] for row in block]) for name in names), _of_values, "an array")


def to_arrays(block: Block) -> Columns:
    """Return the columns as users get them: integers of which some are missing as floats, with NaN.

    Raises DataError for an integer that would lose digits.
    """
    columns = to_columns(block)
    for field in block.schema if _is_table(block) else ():
        if require("pyarrow").types.is_integer(field.type) and len(block) == block[field.name].null_count > 0:
            columns[field.name] = np.full(len(block), math.nan)
    return _each_column(columns.items(), _with_nan, "an array")


def _with_nan(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    kinds = set(map(type, column.flat)) if column.dtype == object else set()
    if type(None) not in kinds or _letters(kinds - {type(None)}) != {"i"}:
        return column
    floats: np.ndarray[Any, Any] = np.array([math.nan if value is None else float(value) for value in column.flat])
    for value, made in zip(column.flat, floats.tolist(), strict=True):
        if value is not None and int(value) != made:
            raise ValueError(f"{value} would lose digits as a float beside gaps; map() and iter_rows() have it exactly")
    made_of_all: np.ndarray[Any, Any] = floats.reshape(column.shape)
    return made_of_all


def converted(block: Block, dtypes: Any, convert: Callable[[str, np.ndarray[Any, Any], Any], _T]) -> dict[str, _T]:
    """Return the columns after a conversion. ``dtypes``: the type of all, or a dict by column. Raises DataError."""
    columns = to_arrays(block)
    wanted = dtypes if isinstance(dtypes, dict) else dict.fromkeys(columns, dtypes)
    if unknown := wanted.keys() - columns.keys():
        raise DataError(f"dtypes names the column {min(unknown)!r}; there are {sorted(columns)}")
    return {name: convert(name, column, wanted.get(name)) for name, column in columns.items()}


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
    if _is_table(block):
        return block
    return require("pyarrow").table(_each_column(to_columns(block).items(), _to_arrow, "a column of Arrow"))


def to_frame(block: Block) -> Any:
    """Return a pandas DataFrame."""
    columns = to_arrays(block).items()
    found = {name: column if column.ndim == 1 else list(column) for name, column in columns}
    return require("pandas").DataFrame(found).infer_objects()


_FORMATS = {"default": to_arrays, "numpy": to_arrays, "pandas": to_frame, "pyarrow": to_table}


def formatter(batch_format: str | None) -> Callable[[Block], Any]:
    """Return the function that converts a block to a format that the user names. Raises ValueError."""
    chosen = batch_format or "default"
    check_choice("batch_format", chosen, list(_FORMATS))
    return _FORMATS[chosen]


def object_types(column: np.ndarray[Any, Any]) -> str:
    """Return the names of the types of a column of objects, for an error message."""
    return ", ".join(sorted({type(value).__name__ for value in column.flat}))


def _each_column(found: Iterable[tuple[str, Any]], convert: Callable[[Any], Any], target: str) -> dict[str, Any]:
    """Return the columns after a conversion. Raises DataError with the name of one that cannot be converted."""
    columns = {}
    name = ""
    try:
        for name, values in found:
            columns[name] = convert(values)
    except _CANNOT as error:
        raise DataError(
            f"column {name!r} cannot become {target}: {error}; give its values one type with map_batches(), or leave "
            "the column out"
        ) from error
    return columns


def _distinct(names: list[str], source: str = "") -> list[str]:
    """Return the names. Raises DataError if one comes twice."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{source}two columns are named {twice!r}; rename one of them")
    return names


# -- columns ---------------------------------------------------------------------------------------------------------

_LETTERS: dict[type, str] = {
    np.datetime64: "M", np.timedelta64: "m", bool: "b", np.bool_: "b", int: "i", np.integer: "i", float: "f",
    np.floating: "f", complex: "c", np.complexfloating: "c",
}  # fmt: skip
"""numpy's letter for a type of numbers, with one for all integers. Durations are integers for numpy, and bools for
Python: they come first."""


def column_of(values: Any) -> np.ndarray[Any, Any]:
    """Return a column in any form as an array; of no dimensions if it is one value."""
    if type(values) is np.ndarray and values.dtype.kind in "biuf" and values.dtype.isnative:
        return values
    if is_instance(values, "pandas", "Series"):
        return _from_series(values)
    if is_instance(values, "pyarrow", "ChunkedArray") or is_instance(values, "pyarrow", "Array"):
        return _from_arrow(values)
    if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__len__"):
        return np.asarray(values)
    values = _as_numpy(values)
    if not isinstance(values, np.ndarray):
        return _of_values(list(values))
    if isinstance(values, np.ma.MaskedArray):
        return _of_values(values.tolist())
    if values.dtype.kind not in "OSTU":
        return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))
    return _of_values(values.tolist()) if values.dtype == object and values.ndim == 1 else values.astype(object)


def empty_column(kind: Any) -> np.ndarray[Any, Any]:
    """Return a column without values of a type of numpy's or Arrow's."""
    return np.empty(0, kind) if isinstance(kind, np.dtype) else _from_arrow(require("pyarrow").array([], kind))


def _as_numpy(value: Any) -> Any:
    """Return an array of another package, such as a tensor or an image of PIL, as numpy's."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value
    if is_instance(value, "torch", "Tensor"):
        return value.detach().cpu().numpy()
    return np.asarray(value) if hasattr(value, "__array__") or hasattr(value, "__array_interface__") else value


def _of_values(values: list[Any]) -> np.ndarray[Any, Any]:
    """Return Python's values as an array."""
    kinds = set(map(type, values))
    if any(kind not in _PLAIN and not issubclass(kind, np.generic) for kind in kinds):
        values = [_as_numpy(value) for value in values]
        kinds = set(map(type, values))
    has_gaps = type(None) in kinds
    kinds.discard(type(None))
    if kinds and all(issubclass(kind, (list, tuple, np.ndarray)) for kind in kinds):
        return _of_rows(values)
    letters = _letters(kinds)
    if letters == {"f"} and has_gaps:
        gap = min(kinds, key=lambda kind: np.dtype(kind).itemsize)("nan")
        values = [gap if value is None else value for value in values]
    elif not letters or "O" in letters or (has_gaps and not letters <= {"M", "m"}):
        return _objects(values)
    if letters <= {"M", "m"}:
        dtypes = {value.dtype for value in values if value is not None}
        return np.array(values, dtype=dtypes.pop()) if len(dtypes) == 1 else _objects(values)
    made = np.array(values)
    if letters == {"i"} and (made.dtype.kind not in "iu" or made.dtype.char == "Q"):
        # From 2**63 on, numpy chooses floats, or ulonglong, which torch does not know.
        return np.array(values, np.uint64) if min(values) >= 0 and max(values) < 1 << 64 else _objects(values)
    if len(letters) > 1:
        plain = [value.item() if isinstance(value, np.generic) else value for value in values]
        is_exact = all(own == value or value != value for own, value in zip(made.tolist(), plain, strict=True))
        return made if is_exact and "b" not in letters else _objects(values)
    return made


def _letters(kinds: Iterable[Any]) -> set[str]:
    return {next((letter for base, letter in _LETTERS.items() if issubclass(kind, base)), "O") for kind in kinds}


_PLAIN = {bool, int, float, complex, str, bytes, list, tuple, dict, type(None), np.ndarray}


def _objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.fromiter(values, dtype=object, count=len(values))


def _of_rows(values: list[Any]) -> np.ndarray[Any, Any]:
    """Return lists or arrays, of which some may be missing, as an array."""
    if not any(isinstance(value, np.ndarray) for value in values):
        lengths = np.array([-1 if value is None else len(value) for value in values])
        inner = list(chain.from_iterable(filter(None, values)))
        return _nested(_of_values(inner) if inner else np.empty(0), lengths)
    rows = [value if value is None else column_of(value) for value in values]
    arrays = [row for row in rows if row is not None]
    is_even = len(arrays) == len(rows) and len({(row.dtype, row.shape) for row in arrays}) == 1
    return np.stack(arrays) if is_even else _objects(rows)


def _nested(inner: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return rows of these lengths as an array, or as objects. ``inner``: what is in all of them; -1: a missing row."""
    if len(lengths) and lengths[0] >= 0 and (lengths == lengths[0]).all():
        return inner.reshape(len(lengths), lengths[0], *inner.shape[1:])
    inner = inner if inner.flags.writeable else inner.copy()
    ends = np.cumsum(np.maximum(lengths, 0)).tolist()
    places = zip(ends, lengths.tolist(), strict=True)
    return _objects([None if length < 0 else inner[end - length : end] for end, length in places])


def _joined_columns(columns: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the values of several columns as one."""
    if len({(column.dtype, column.shape[1:]) for column in columns}) == 1:
        return np.concatenate(columns)
    return _of_values([value for column in columns for value in column])


def _from_series(series: Any) -> np.ndarray[Any, Any]:
    """Return a column of pandas as an array."""
    if hasattr(series.dtype, "categories"):  # an array of these would have floats for integers
        values = list(series.dtype.categories)
        return _of_values([None if code < 0 else values[code] for code in series.cat.codes])
    if isinstance(series.dtype, np.dtype) and series.dtype != object:
        return np.asarray(series)
    if hasattr(series.dtype, "pyarrow_dtype") or hasattr(series.dtype, "numpy_dtype"):
        return _from_arrow(require("pyarrow").array(series))
    return _of_values(series.to_numpy(object, na_value=None).tolist())


def _from_arrow(column: Any) -> np.ndarray[Any, Any]:
    """Return an Arrow column as an array."""
    pa = require("pyarrow")
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    kind, types = column.type, pa.types
    if types.is_floating(kind) or (types.is_integer(kind) and not column.null_count):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if isinstance(column, pa.ExtensionArray):
        return _from_extension(column)
    if types.is_dictionary(kind):
        return _from_arrow(column.dictionary_decode())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        lengths = column.value_lengths()
        lengths = lengths.fill_null(-1) if column.null_count else lengths
        return _nested(_from_arrow(column.flatten()), lengths.to_numpy(zero_copy_only=False))
    if types.is_nested(kind) or types.is_integer(kind) or getattr(kind, "tz", None):
        return _objects(column.to_pylist())
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _from_extension(column: Any) -> np.ndarray[Any, Any]:
    """Return a column of a type that extends another one as an array."""
    if hasattr(column, "to_numpy_ndarray"):
        if not column.null_count and not column.storage.flatten().null_count:
            return np.asarray(column.to_numpy_ndarray())
        return _of_rows([_tensor(value, column.type) if value.is_valid else None for value in column.storage])
    is_of_arrow = type(column.type).__module__.startswith("pyarrow.")
    return _of_values(column.to_pylist()) if is_of_arrow else _from_arrow(column.storage)


def _tensor(values: Any, kind: Any) -> np.ndarray[Any, Any]:
    """Return the values of one row of a column of tensors, some of which may be missing. pyarrow would make them 0."""
    made: np.ndarray[Any, Any] = _from_arrow(values.values).reshape(kind.shape)
    return np.transpose(made, kind.permutation or range(made.ndim))


def _to_arrow(column: np.ndarray[Any, Any]) -> Any:
    """Return an array as a column of Arrow. Raises one of :data:`_CANNOT` if Arrow has no type for its values."""
    pa = require("pyarrow")
    if column.dtype == object:
        return _objects_to_arrow(column.tolist())
    made = pa.array(column.reshape(-1))
    lists, offset = (pa.ListArray, np.int32) if column.size < 1 << 31 else (pa.LargeListArray, np.int64)
    for axis in range(column.ndim - 1, 0, -1):
        rows, length = int(np.prod(column.shape[:axis])), column.shape[axis]
        made = lists.from_arrays((np.arange(rows + 1) * length).astype(offset), made)
    return made


def _objects_to_arrow(values: list[Any]) -> Any:
    """Return values as a column of Arrow, which changes some mixtures of types. So it is compared."""
    kinds = set(map(type, values)) - {type(None)}
    is_simple = len(kinds) == 1 and kinds <= {str, bytes, int, float}
    values = values if is_simple else [_listed(value) for value in values]
    made = require("pyarrow").array(values)
    if not is_simple and not all(map(_is_same, made.to_pylist(), values)):
        raise ValueError(f"Arrow has no type for all its values, which are of type {object_types(_objects(values))}")
    return made


def _listed(value: Any) -> Any:
    """Return a value with lists in place of arrays."""
    if isinstance(value, dict):
        return {name: _listed(item) for name, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype == "M8[D]":  # pyarrow raises for its values in lists
        value = value.astype(object)
    return [_listed(item) for item in value] if isinstance(value, (list, tuple, np.ndarray)) else value


def _is_same(found: Any, given: Any) -> bool:
    """Return whether Arrow gives the value back that it got."""
    if isinstance(given, dict):
        return all(_is_same(found.get(name), item) for name, item in given.items())
    if isinstance(given, list):
        return all(map(_is_same, found, given))
    if found is None or found != found:
        return bool(given is None or given != given)
    return bool(found == given) and isinstance(found, bool) == isinstance(given, (bool, np.bool_))


# -- kinds of objects, without importing their packages --------------------------------------------------------------


def is_instance(value: object, module: str, name: str) -> bool:
    """Return whether ``value`` is an instance of a class of a package that may not be imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _is_table(value: object) -> bool:
    return is_instance(value, "pyarrow", "Table")

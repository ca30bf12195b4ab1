"""``ray.data.Dataset``: a Dataset of distrain.data with the other methods of Ray's that training scripts use.

The rows come lazily, on the workers. Sorting, aggregates, ``union()`` and the functions that write files read all rows
into the memory of the process that calls them. Runs in: anywhere.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from distrain.as_ray.sentences import check_options, sentence
from distrain.data import blocks
from distrain.data.dataset import Constructed
from distrain.data.dataset import Dataset as PlainDataset
from distrain.data.iterator import DataIterator
from distrain.data.passes import Worker
from distrain.data.sources import MemorySource
from distrain.errors import DataError
from distrain.system.imports import find_filesystem, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distrain.data.blocks import Block
    from distrain.data.order import Span

_LOOPS = ("iter_batches", "iter_tf_batches", "iter_torch_batches", "to_tf")
_AGGREGATES = ("max", "mean", "min", "std", "sum")
_seeds = count()
"""Seeds of the calls without one: each has another order, which a script that is started again finds again."""


class Dataset(PlainDataset):
    """Rows to train on, as ``ray.data`` makes them. See :class:`distrain.data.Dataset`."""

    def __repr__(self) -> str:
        return "Dataset(its rows are read when they are needed)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _AGGREGATES:
            return partial(self._aggregated, name)
        if name in _LOOPS:
            return getattr(self.iterator(), name)
        raise AttributeError(f"ray.data.Dataset has no {name}() in distrain: {sentence(f'ray.data.Dataset.{name}')}")

    # -- operations -----------------------------------------------------------------------------------------------

    def map_batches(
        self, fn: Any, *, batch_size: Any = None, udf_modifying_row_count: bool | None = None, **options: Any
    ) -> Dataset:
        """Apply a function to batches. If it changes the number of the first rows, all are counted beforehand."""
        batch_format = options.pop("batch_format", None)
        function = _with_arguments("map_batches", fn, options)
        keeps_rows = None if udf_modifying_row_count is None else not udf_modifying_row_count
        size = batch_size if isinstance(batch_size, int) else None
        return super().map_batches(function, batch_size=size, batch_format=batch_format, keeps_rows=keeps_rows)

    def map(self, fn: Callable[..., Any], **options: Any) -> Dataset:
        """Apply a function to each row."""
        return super().map(_for_rows("map", fn, options))

    def flat_map(self, fn: Callable[..., Iterable[Any]], **options: Any) -> Dataset:
        """Replace each row by the rows of a list."""
        return super().flat_map(_for_rows("flat_map", fn, options))

    def filter(self, fn: Callable[..., bool] | None = None, expr: Any = None, **options: Any) -> Dataset:
        """Keep the rows for which a function is true, or a condition, see :func:`_kept`."""
        if fn is not None:
            return super().filter(_for_rows("filter", fn, options))
        check_options("filter", options)
        return self._mapped(partial(_kept, expr), "filter()", keeps_rows=False)

    def add_column(self, col: str, fn: Any, *, batch_format: str | None = "pandas", **options: Any) -> Dataset:
        """Add a column, which a function makes of batches."""
        check_options("add_column", options)

        def add(batch: Any) -> Any:
            columns, made = blocks.to_columns(blocks.as_block(batch, "add_column()")), fn(batch)
            return {**columns, col: made if blocks.column_of(made).ndim else [made] * blocks.row_count(columns)}

        return super().map_batches(add, batch_format=batch_format)

    def drop_columns(self, cols: str | Sequence[str], **options: Any) -> Dataset:
        """Leave columns out."""
        left_out = _names_of(cols)
        return self._of_columns("drop_columns", left_out, lambda old: {one: one for one in old if one not in left_out})

    def select_columns(self, cols: str | Sequence[str], **options: Any) -> Dataset:
        """Keep these columns, in this order."""
        return self._of_columns("select_columns", _names_of(cols), lambda old: {one: one for one in _names_of(cols)})

    def rename_columns(self, names: Mapping[str, str] | Sequence[str], **options: Any) -> Dataset:
        """Give columns other names: those of a dict, or all of them."""
        if isinstance(names, dict):
            return self._of_columns("rename_columns", names, lambda old: {one: names.get(one, one) for one in old})
        return self._of_columns("rename_columns", (), lambda old: dict(zip(old, names, strict=True)))

    def _of_columns(
        self, function: str, named: Iterable[str], choose: Callable[[Iterable[str]], dict[str, str]]
    ) -> Dataset:
        """Keep and rename columns. ``choose`` gets all names, and returns the new name of each column to keep.

        named: the columns that the user names.
        """

        def chosen(block: Block) -> Block:
            columns = blocks.to_columns(block)
            if missing := [name for name in named if name not in columns]:
                raise DataError(f"{function}() names the column {missing[0]!r}; there are {[*columns]}")
            new = choose(columns)
            if len({*new.values()}) < len(new):
                raise DataError(f"{function}() gives several columns one name: {[*new.values()]}")
            return {name: columns[old] for old, name in new.items()}

        return self._mapped(chosen, f"{function}()")

    def random_shuffle(self, *, seed: int | None = None, buffer_rows: int | None = None, **options: Any) -> Dataset:
        """Shuffle the rows anew in each epoch."""
        return super().random_shuffle(seed=next(_seeds) if seed is None else seed, buffer_rows=buffer_rows)

    def train_test_split(self, test_size: float, *, shuffle: bool = False, seed: Any = None, **options: Any) -> Any:
        """Return two datasets: for training, and for tests."""
        check_options("train_test_split", options)
        return super().train_test_split(test_size, shuffle=shuffle, seed=next(_seeds) if seed is None else seed)

    def split_at_indices(self, indices: Sequence[int]) -> list[Dataset]:
        """Return the parts between these rows."""
        return [self._part(partial(_span, start, stop)) for start, stop in pairwise([0, *indices, sys.maxsize])]

    def repartition(self, *args: Any, shuffle: bool = False, **options: Any) -> Dataset:
        """Return the dataset itself, or shuffled: its rows are divided among the workers when they train."""
        return self.random_shuffle() if shuffle else self

    # -- looking at the rows --------------------------------------------------------------------------------------

    def take(self, limit: int = 20) -> list[Any]:
        """Return the first rows, as dicts of Python's values."""
        return [plain(row) for row in super().take(limit)]

    def take_all(self, limit: int | None = None) -> list[Any]:
        """Return all rows."""
        return [plain(row) for row in blocks.to_rows(self.read())]

    def take_batch(self, batch_size: int = 20, *, batch_format: str | None = "default") -> Any:
        """Return the first rows as a batch."""
        return blocks.formatter(batch_format)(self.limit(batch_size).read())

    def show(self, limit: int = 20) -> None:
        """Print the first rows."""
        print(*self.take(limit), sep="\n")

    def columns(self, fetch_if_missing: bool = True) -> list[str]:
        """Return the names of the columns."""
        return list(self.schema().names)

    def stats(self) -> str:
        """Return a line: there are no times to tell, as the rows are read when they are needed."""
        return repr(self)

    def iterator(self) -> DataIterator:
        """Return an iterator over all rows, in this process."""
        return DataIterator(self, name="dataset", worker=Worker(0, 1))

    def iter_rows(self) -> Iterator[Any]:
        """Yield all rows, as dicts of Python's values."""
        return map(plain, self.iterator().iter_rows())

    # -- all rows in memory ---------------------------------------------------------------------------------------

    def to_pandas(self, limit: int | None = None) -> Any:
        """Return all rows as a DataFrame."""
        return blocks.to_frame(self.read())

    def union(self, *others: PlainDataset) -> Dataset:
        """Return the rows of several datasets, one after the other."""
        return self.in_memory(blocks.joined([dataset.read() for dataset in (self, *others)]))

    def in_memory(self, rows: Any) -> Dataset:
        """Return these rows instead: a table, a DataFrame, a dict of arrays or a list."""
        return Dataset(partial(MemorySource, blocks.as_block(rows, "ray.data")))

    def sort(self, key: str | list[str], descending: bool | list[bool] = False, **options: Any) -> Dataset:
        """Return the rows in the order of some columns."""
        ascending = [not flag for flag in descending] if isinstance(descending, list) else not descending
        return self.in_memory(self.to_pandas().sort_values(key, ascending=ascending, kind="stable"))

    def unique(self, column: str, **options: Any) -> list[Any]:
        """Return the values of a column, each once."""
        return [_plain_value(value) for value in blocks.column_of(self.to_pandas()[column].drop_duplicates())]

    def _aggregated(self, how: str, on: str | list[str] | None = None, **options: Any) -> Any:
        """Return the sum, mean and so on of a column, or a dict of those of several ones."""
        frame = self.to_pandas()
        found = {name: _plain_value(getattr(frame[name], how)(**options)) for name in _names_of(on or list(frame))}
        return found[on] if isinstance(on, str) else {f"{how}({name})": value for name, value in found.items()}

    def write_parquet(self, path: str, **options: Any) -> None:
        """Write a file beside those in a directory."""
        check_options("write_parquet", options)
        buffer = require("pyarrow").BufferOutputStream()
        require("pyarrow.parquet").write_table(blocks.to_table(self.read()), buffer)
        filesystem, place = find_filesystem(path)
        filesystem.makedirs(place, exist_ok=True)
        with filesystem.open(f"{place.rstrip('/')}/{uuid4().hex}_000000.parquet", "wb") as file:
            file.write(buffer.getvalue())


# -- functions of the user's -----------------------------------------------------------------------------------------


def _with_arguments(method: str, fn: Any, options: dict[str, Any]) -> Callable[[Any], Any]:
    """Return the user's function with the arguments of Ray for it; of a class, an object that the first call makes."""
    args, kwargs = options.pop("fn_args", None) or (), options.pop("fn_kwargs", None) or {}
    if isinstance(fn, type):
        own = options.pop("fn_constructor_args", None), options.pop("fn_constructor_kwargs", None)
        fn = Constructed(fn, own[0] or (), own[1] or {})
    check_options(method, options)
    return lambda thing: fn(thing, *args, **kwargs)


def _for_rows(method: str, fn: Any, options: dict[str, Any]) -> Callable[[Any], Any]:
    """Return the user's function for rows with values of Python."""
    function = _with_arguments(method, fn, options)
    return lambda row: function(plain(row))


def _span(start: int, stop: int, rows: int) -> Span:
    return min(rows, start), min(rows, stop)


def _kept(condition: Any, block: Block) -> Block:
    """Return the rows of a block for which a condition is true. Missing values meet no comparison.

    condition: an expression of ``pyarrow.compute``; or text for ``DataFrame.eval()`` of pandas, such as
        ``"x > 1 and (`a name`.notna() or z not in [2, 3])"``.
    """
    table = blocks.to_table(block)
    if isinstance(condition, str) and len(table):
        frame = table.to_pandas(types_mapper=require("pandas").ArrowDtype)  # which has Arrow's missing values
        condition = require("pyarrow").array(frame.eval(condition, engine="python"))
    return table.filter(condition) if len(table) else block


def plain(row: Any) -> Any:
    """Return a row with values of Python in place of numpy's."""
    return {name: _plain_value(value) for name, value in row.items()} if isinstance(row, dict) else row


def _plain_value(value: Any) -> Any:
    """Return a value of Python for one of numpy, but for times, which numpy has more exactly."""
    return value.item() if isinstance(value, np.generic) and value.dtype.kind not in "mM" else value


def _names_of(names: str | Sequence[str]) -> list[str]:
    """Return a list of names for one name, or for several."""
    return [names] if isinstance(names, str) else list(names)

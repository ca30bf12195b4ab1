"""``ray.data.Dataset``: a Dataset of distrain.data with the other methods of Ray's.

The rows come lazily, on the workers. Sorting, groups, aggregates, ``union()`` and the functions that write files
read all rows into the memory of the process that calls them. Runs in: anywhere.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, cast

from distrain.as_ray.data.arguments import (
    all_batches,
    check_options,
    constructed,
    for_rows,
    instead_of,
    names_of,
    plain,
    plain_value,
)
from distrain.as_ray.data.expressions import kept_by
from distrain.as_ray.data.writing import write_files
from distrain.data.blocks import (
    as_block,
    column_of,
    formatter,
    is_instance,
    joined,
    row_count,
    to_columns,
    to_frame,
    to_rows,
    to_table,
)
from distrain.data.dataset import Dataset as PlainDataset
from distrain.data.iterator import DataIterator
from distrain.data.passes import Worker
from distrain.data.sources import MemorySource, TableSource
from distrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distrain.data.blocks import Block
    from distrain.data.order import Span

_LOOPS = ("iter_batches", "iter_tf_batches", "iter_torch_batches")
_seeds = count()
"""Seeds of the calls without one: each has another order, which a script that is started again finds again."""
_AGGREGATES = ("max", "mean", "min", "std", "sum")


class Dataset(PlainDataset):
    """Rows to train on, as ``ray.data`` makes them. See :class:`distrain.data.Dataset`."""

    @classmethod
    def of(cls, dataset: PlainDataset) -> Dataset:
        """Return the same rows as a Dataset of this class."""
        return cls(dataset._make, dataset._operations, dataset._shuffle)

    @classmethod
    def in_memory(cls, rows: Any) -> Dataset:
        """Return rows in memory: a table, a DataFrame, a dict of arrays or a list."""
        return cls(partial(MemorySource, as_block(rows, "ray.data")))

    def __repr__(self) -> str:
        return "Dataset(its rows are read when they are needed)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _AGGREGATES:
            return partial(self._aggregated, name)
        if name in _LOOPS:
            return partial(self._loop, name)
        raise AttributeError(f"ray.data.Dataset has no {name}() in distrain: {instead_of(name)}")

    # -- operations -----------------------------------------------------------------------------------------------

    def map_batches(
        self,
        fn: Callable[..., Any],
        *,
        batch_size: int | str | None = None,
        fn_args: Sequence[Any] | None = None,
        fn_constructor_args: Sequence[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        udf_modifying_row_count: bool | None = None,
        batch_format: str | None = "default",
        fn_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Dataset:
        """Apply a function to batches. If it changes the number of the first rows, all are counted beforehand."""
        check_options("map_batches", options)
        return super().map_batches(
            all_batches(constructed(fn, fn_constructor_args, fn_constructor_kwargs), fn_args or (), fn_kwargs or {}),
            batch_size=batch_size if isinstance(batch_size, int) else None,
            batch_format=batch_format,
            keeps_rows=None if udf_modifying_row_count is None else not udf_modifying_row_count,
        )

    def map(self, fn: Callable[..., Any], **options: Any) -> Dataset:
        """Apply a function to each row."""
        return super().map(for_rows("map", fn, options))

    def filter(self, fn: Callable[..., bool] | None = None, expr: Any = None, **options: Any) -> Dataset:
        """Keep the rows for which a function is true, or a condition. See :func:`kept_by` for conditions."""
        if (fn is None) == (expr is None) or isinstance(fn, str):
            raise ValueError('filter() takes a function, or expr= with a condition such as "x > 1"')
        if fn is not None:
            return super().filter(for_rows("filter", fn, options))
        check_options("filter", options)
        return self._mapped(kept_by(expr), "filter()", keeps_rows=False)

    def flat_map(self, fn: Callable[..., Iterable[Any]], **options: Any) -> Dataset:
        """Replace each row by the rows of a list."""
        return super().flat_map(for_rows("flat_map", fn, options))

    def add_column(
        self, col: str, fn: Callable[[Any], Any], *, batch_format: str | None = "pandas", **options: Any
    ) -> Dataset:
        """Add a column, which a function makes of batches."""
        check_options("add_column", options)

        def add(batch: Any) -> Any:
            columns, made = to_columns(as_block(batch, "add_column()")), fn(batch)
            return {**columns, col: made if column_of(made).ndim else [made] * row_count(columns)}

        return super().map_batches(add, batch_format=batch_format)

    def drop_columns(self, cols: str | Sequence[str], **options: Any) -> Dataset:
        """Leave columns out."""
        check_options("drop_columns", options)
        left_out = names_of(cols)
        return self._of_columns(
            "drop_columns", left_out, lambda old: {name: name for name in old if name not in left_out}
        )

    def select_columns(self, cols: str | Sequence[str], **options: Any) -> Dataset:
        """Keep these columns, in this order."""
        check_options("select_columns", options)
        chosen = names_of(cols)
        return self._of_columns("select_columns", chosen, lambda old: {name: name for name in chosen})

    def rename_columns(self, names: Mapping[str, str] | Sequence[str], **options: Any) -> Dataset:
        """Give columns other names: those of a dict, or all of them."""
        check_options("rename_columns", options)
        if isinstance(names, dict):
            return self._of_columns("rename_columns", names, lambda old: {name: names.get(name, name) for name in old})
        return self._of_columns("rename_columns", (), lambda old: dict(zip(old, names, strict=True)))

    def _of_columns(
        self, function: str, named: Iterable[str], choose: Callable[[Sequence[str]], dict[str, str]]
    ) -> Dataset:
        """Keep and rename columns. ``choose`` gets all names, and returns the new name of each column to keep.

        named: the columns that the user names.
        """

        def chosen(block: Block) -> Block:
            table = block if is_instance(block, "pyarrow", "Table") else to_columns(block)
            found = list(table) if isinstance(table, dict) else table.column_names
            _check_columns(function, named, found)
            new = choose(found)
            if len({*new.values()}) < len(new):
                raise DataError(f"{function}() gives several columns one name: {[*new.values()]}")
            if isinstance(table, dict):
                return {other: table[old] for old, other in new.items()}
            return table.select(list(new)).rename_columns(list(new.values()))

        return self._mapped(chosen, f"{function}()")

    def random_shuffle(self, *, seed: int | None = None, buffer_rows: int | None = None, **options: Any) -> Dataset:
        """Shuffle the rows anew in each epoch."""
        check_options("random_shuffle", options)
        return super().random_shuffle(seed=next(_seeds) if seed is None else seed, buffer_rows=buffer_rows)

    def train_test_split(
        self, test_size: float, *, shuffle: bool = False, seed: int | None = None, **options: Any
    ) -> tuple[Dataset, Dataset]:
        """Return two datasets: for training, and for tests."""
        check_options("train_test_split", options)
        return super().train_test_split(test_size, shuffle=shuffle, seed=next(_seeds) if seed is None else seed)

    def repartition(self, *args: Any, shuffle: bool = False, **options: Any) -> Dataset:
        """Return the dataset itself, or shuffled: its rows are divided among the workers when they train."""
        return self.random_shuffle() if shuffle else self

    # -- parts ----------------------------------------------------------------------------------------------------

    def split(self, n: int, *, equal: bool = False, **options: Any) -> list[Dataset]:
        """Return ``n`` parts. ``equal``: of the same size, without the rows that are left."""
        check_options("split", options)
        return self._parts(n, lambda rows, place: rows // n * place if equal else rows * place // n)

    def split_at_indices(self, indices: Sequence[int]) -> list[Dataset]:
        """Return the parts between these rows. Raises ValueError for numbers that do not ascend from 0."""
        if not indices or [*indices] != sorted(indices) or indices[0] < 0:
            raise ValueError(f"split_at_indices() takes ascending numbers of rows, got {indices!r}")
        return self._parts(len(indices) + 1, lambda rows, place: min(rows, [0, *indices, rows][place]))

    def _parts(self, count: int, start: Callable[[int, int], int]) -> list[Dataset]:
        """Return parts. ``start``: returns where a part begins, given the number of rows and the part's own."""

        def span(rows: int, place: int) -> Span:
            return start(rows, place), start(rows, place + 1)

        return [self._part(partial(span, place=place)) for place in range(count)]

    # -- looking at the rows --------------------------------------------------------------------------------------

    def take(self, limit: int = 20) -> list[Any]:
        """Return the first rows, as dicts of Python's values."""
        return [plain(row) for row in super().take(limit)]

    def take_all(self, limit: int | None = None) -> list[Any]:
        """Return all rows. Raises ValueError if there are more than ``limit``."""
        rows = [plain(row) for row in to_rows(self.read())]
        if limit is not None and len(rows) > limit:
            raise ValueError(f"take_all(limit={limit}): the dataset has more rows")
        return rows

    def take_batch(self, batch_size: int = 20, *, batch_format: str | None = "default") -> Any:
        """Return the first rows as a batch."""
        return formatter(batch_format)(self.limit(batch_size).read())

    def show(self, limit: int = 20) -> None:
        """Print the first rows."""
        for row in self.take(limit):
            print(row)

    def columns(self, fetch_if_missing: bool = True) -> list[str]:
        """Return the names of the columns."""
        return list(self.schema().names)

    # -- facts ----------------------------------------------------------------------------------------------------

    name: ClassVar[str | None] = None

    def set_name(self, name: str | None) -> None:
        """Set the name, which has no effect."""
        object.__setattr__(self, "name", name)

    def stats(self) -> str:
        """Return a line: there are no times to tell, as the rows are read when they are needed."""
        return repr(self)

    def num_blocks(self) -> int:
        """Return the number of row groups or files, or of parts of what is in memory. Raises DataError for a stream."""
        _, source = self.count(), cast("TableSource", self.open().source)
        return len(source.block_rows)

    def size_bytes(self) -> int:
        """Return the approximate size in memory. Raises DataError for a stream."""
        rows, source = self.count(), cast("TableSource", self.open().source)
        return int(source.row_bytes * rows) or int(to_table(self.read()).nbytes)

    # -- batches in this process ----------------------------------------------------------------------------------

    def iterator(self) -> DataIterator:
        """Return an iterator over all rows, in this process."""
        return DataIterator(self, name="dataset", worker=Worker(0, 1))

    def _loop(self, method: str, **options: Any) -> Iterable[Any]:
        """Return what a method of the iterator returns; nothing if there are no rows."""
        source = self.open().source
        if isinstance(source, TableSource) and not source.rows:
            return ()
        batches: Iterable[Any] = getattr(self.iterator(), method)(**options)
        return batches

    def iter_rows(self) -> Iterator[Any]:
        """Yield all rows, as dicts of Python's values."""
        return map(plain, self._loop("iter_rows"))

    def to_tf(self, feature_columns: Any, label_columns: Any, **options: Any) -> Any:
        """Return a ``tf.data.Dataset``. See :meth:`DataIterator.to_tf`."""
        return self.iterator().to_tf(feature_columns, label_columns, **options)

    # -- all rows in memory ---------------------------------------------------------------------------------------

    def to_pandas(self, limit: int | None = None) -> Any:
        """Return all rows as a DataFrame. Raises ValueError if there are more than ``limit``."""
        if limit is not None and (rows := self.count()) > limit:
            raise ValueError(f"to_pandas(limit={limit}): the dataset has {rows} rows; for the first ones, use limit()")
        return to_frame(self.read())

    def union(self, *others: PlainDataset) -> Dataset:
        """Return the rows of several datasets, one after the other."""
        return self.in_memory(joined([dataset.read() for dataset in (self, *others)]))

    def sort(self, key: str | list[str], descending: bool | list[bool] = False, **options: Any) -> Dataset:
        """Return the rows in the order of some columns."""
        ascending = [not flag for flag in descending] if isinstance(descending, list) else not descending
        frame = self._frame_with("sort", key)
        return self.in_memory(frame.sort_values(key, ascending=ascending, kind="stable"))

    def groupby(self, key: str | list[str], **options: Any) -> GroupedData:
        """Group the rows by the values of columns."""
        check_options("groupby", options)
        return GroupedData(self._frame_with("groupby", key), key, self.in_memory)

    def unique(self, column: str, **options: Any) -> list[Any]:
        """Return the values of a column, each once."""
        check_options("unique", options)
        values = column_of(self._frame_with("unique", column)[column].drop_duplicates())
        return [plain_value(value) for value in values]

    def _aggregated(self, how: str, on: str | list[str] | None = None, **options: Any) -> Any:
        """Return the sum, mean and so on of a column, or a dict of those of several ones."""
        frame = self._frame_with(how, on or ())
        found: dict[str, Any] = {}
        try:
            for name in names_of(on or list(frame)):
                found[name] = plain_value(getattr(frame[name], how)(**options)) if len(frame) else None
        except TypeError as error:
            raise DataError(f"{how}(): column {name!r} ({frame[name].dtype}) has no {how}: {error}") from error
        return found[on] if isinstance(on, str) else {f"{how}({name})": value for name, value in found.items()}

    def _frame_with(self, function: str, names: str | Sequence[str]) -> Any:
        """Return all rows as a DataFrame. Raises DataError if it lacks a column."""
        frame = self.to_pandas()
        _check_columns(function, names_of(names), frame)
        return frame

    def write_parquet(self, path: str, **options: Any) -> None:
        """Write a Parquet file into a directory. ``options``: of ``pyarrow.parquet.write_table()``."""
        write_files(self.read(), path, "parquet", options)

    def write_csv(self, path: str, **options: Any) -> None:
        """Write a CSV file into a directory. ``options``: of ``pyarrow.csv.write_csv()``."""
        write_files(self.read(), path, "csv", options)


class GroupedData:
    """Rows in groups of pandas, in memory; ``Dataset.groupby()`` returns it."""

    def __init__(self, frame: Any, key: str | list[str], make: Callable[[Any], Any]) -> None:
        """``make``: returns the dataset of a block."""
        self._make = make
        self._groups = frame.groupby(names_of(key), dropna=False)

    def __getattr__(self, name: str) -> Any:
        if name in _AGGREGATES:
            return partial(self._aggregated, name)
        raise AttributeError(f"GroupedData has no {name}() in distrain: use map_groups(), or to_pandas().groupby()")

    def _aggregated(self, how: str, on: str | list[str] | None = None, **options: Any) -> Any:
        groups = self._groups if on is None else self._groups[names_of(on)]
        found = getattr(groups, how)(**options)
        return self._make(found.rename(columns=lambda name: f"{how}({name})").reset_index())

    def count(self) -> Any:
        """Return the number of rows of each group."""
        return self._make(self._groups.size().reset_index(name="count()"))

    def map_groups(self, fn: Callable[..., Any], *, batch_format: str | None = "default", **options: Any) -> Any:
        """Return the rows that a function makes of each group."""
        function = for_rows("map_groups", fn, options)
        to_format = formatter(batch_format)
        groups = (to_format(as_block(frame, "groupby()")) for _, frame in self._groups)
        return self._make(joined([to_columns(as_block(function(group), "map_groups()")) for group in groups]))


def _check_columns(function: str, wanted: Iterable[str], found: Iterable[str]) -> None:
    found = list(found)
    if missing := [name for name in wanted if name not in found]:
        raise DataError(f"{function}() names the column {missing[0]!r}; there are {found}")

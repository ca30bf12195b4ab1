"""Datasets: rows to train on, and what to do with them on the worker. Runs in: anywhere.

A Dataset is a description. It opens nothing before its rows are asked for, on the worker or in the user's process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from distrain.data.blocks import Block, as_block, formatter, in_pieces, joined, kept_rows, row_count, to_rows, writable
from distrain.data.files import FileSource
from distrain.data.order import Permutation, RowOrder, Span
from distrain.data.passes import in_order
from distrain.data.sources import (
    ROWS_AT_ONCE,
    IndexedSource,
    MemorySource,
    RemadeSource,
    Schema,
    SlicedSource,
    Stream,
    TableSource,
    schema_of,
)
from distrain.errors import DataError
from distrain.system.arguments import check_int, check_type

if TYPE_CHECKING:
    from typing_extensions import Self

_SHUFFLE_BYTES = 64 << 20
"""Memory of the rows of files that ``random_shuffle()`` mixes, about."""
_ROWS_TO_TRY = 128
"""Rows that show whether the user's function changes their number."""
_LEAST_SHUFFLED, _MOST_SHUFFLED = 1 << 10, 1 << 18


@dataclass(frozen=True)
class Dataset:
    """Rows to train on. Make one with :func:`read_parquet` and the other functions of :mod:`distrain.data`.

    Its methods return new datasets and read nothing. Functions run on the workers, batch by batch, while they train.

    ::

        rows = distrain.data.read_parquet("folder").filter(lambda row: row["x"] > 0).random_shuffle(seed=1)
        trainer = distrain.torch.TorchTrainer(train_func, datasets={"train": rows})
    """

    _make: Callable[[], TableSource | Stream | OpenDataset]
    _operations: tuple[Callable[[OpenDataset], OpenDataset], ...] = ()
    _shuffle: tuple[int, int | None] | None = None
    """The seed, and the number of rows that are mixed in memory; None: see :data:`_SHUFFLE_BYTES`."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "opened"}

    # -- operations -----------------------------------------------------------------------------------------------

    def map_batches(
        self,
        fn: Callable[..., Any],
        *,
        batch_size: int | None = None,
        batch_format: str | None = "default",
        keeps_rows: bool | None = True,
    ) -> Self:
        """Apply a function to batches of rows, on the worker.

        fn: takes and returns a dict of numpy arrays, a pyarrow Table or a pandas DataFrame. A class is constructed once
            on each worker.
        batch_size: the most rows of a call; None: those of the batch that is being made.
        batch_format: ``"numpy"`` (the default), ``"pandas"`` or ``"pyarrow"``.
        keeps_rows: False: ``fn`` may return more or fewer rows than it gets, see :meth:`flat_map`; None: so it may if
            it does for the first rows.

        ::

            rows.map_batches(lambda batch: {"x": batch["x"] / 255})
        """
        check_int("batch_size", batch_size, minimum=1, optional=True)
        function: Callable[..., Any] = Constructed(fn, (), {}) if isinstance(fn, type) else fn
        to_format = formatter(batch_format)
        return self._mapped(lambda block: function(writable(to_format(block))), "map_batches()", batch_size, keeps_rows)

    def map(self, fn: Callable[[Any], Any]) -> Self:
        """Apply a function to each row, on the worker. It takes and returns a dict.

        ::

            rows.map(lambda row: {"x": row["x"] / 255})
        """
        return self._mapped(lambda block: [as_row(fn(row)) for row in to_rows(block)], "map()")

    def flat_map(self, fn: Callable[[Any], Iterable[Any]]) -> Self:
        """Replace each row by the rows of a list, which a function returns on the worker.

        The new rows are counted first, so that all ranks get equally many: each worker runs the function on all data
        once more. It must return equally many rows each time. Raises DataError for a stream, when it is opened.

        ::

            rows.flat_map(lambda row: [row, {"x": -row["x"]}])
        """
        check_type("flat_map(fn)", fn, Callable)
        return self._mapped(
            lambda block: [as_row(made) for row in to_rows(block) for made in fn(row)], "flat_map()", keeps_rows=False
        )

    def filter(self, fn: Callable[[Any], bool]) -> Self:
        """Keep the rows for which a function returns True.

        The rows are counted first, so that all ranks get equally many: each worker reads all data once more.

        ::

            rows.filter(lambda row: row["x"] > 0)
        """
        check_type("filter(fn)", fn, Callable)
        return self._then(partial(OpenDataset.filtered, function=fn))

    def limit(self, limit: int) -> Self:
        """Keep the first rows; random ones after ``random_shuffle()``, the same ones in each epoch.

        For random ones, each worker reads all rows of files into memory.
        Raises DataError for a stream, when it is opened.

        ::

            rows.limit(1000)
        """
        check_int("limit", limit, minimum=1)
        return self._part(lambda rows: (0, min(rows, limit)))

    def random_shuffle(self, *, seed: int | None = None, buffer_rows: int | None = None) -> Self:
        """Shuffle the rows anew in each epoch. The order follows from the seed and the epoch.

        Data in memory, and other data that finds any row at once, is shuffled completely. Of files, the blocks (row
        groups of Parquet, or files) come in a random order, and consecutive rows are mixed in memory: about 64 MB, from
        1,024 to 262,144 rows.

        seed: 0 by default.
        buffer_rows: the number of rows to mix in memory.

        ::

            rows.random_shuffle(seed=1)
        """
        check_int("buffer_rows", buffer_rows, minimum=1, optional=True)
        return replace(self, _shuffle=(seed or 0, buffer_rows))

    def train_test_split(
        self, test_size: float, *, shuffle: bool = False, seed: int | None = None
    ) -> tuple[Self, Self]:
        """Return two datasets: for training, and for tests.

        test_size: the number of rows of the second one, or their fraction (a float below 1).
        shuffle: choose its rows at random, for which each worker reads all rows of files into memory; False: they are
            the last rows, unless ``random_shuffle()`` came before.
        seed: of the random choice; 0 by default.

        Raises DataError for a stream, when it is opened.

        ::

            train, test = rows.train_test_split(0.2)
        """
        is_fraction = isinstance(test_size, float) and 0 < test_size < 1
        if not is_fraction and (isinstance(test_size, bool) or not isinstance(test_size, int) or test_size < 1):
            raise ValueError(f"test_size must be a fraction below 1, or a number of rows, got {test_size!r}")
        chosen = (seed or 0) if shuffle else None
        spans = (partial(span_of_split, size=test_size, test=test) for test in (False, True))
        train, test = (self._part(span, seed=chosen) for span in spans)
        return train, test

    def _part(self, span_of: Callable[[int], Span], *, seed: int | None = None) -> Self:
        """Return the rows of a span that depends on the number of rows.

        seed: of the random order in which rows are counted; None: that of an earlier ``random_shuffle()``, if any.
        """
        if seed is None and self._shuffle:
            seed = self._shuffle[0]
        return self._then(partial(OpenDataset.part, span_of=span_of, seed=seed))

    def _mapped(
        self, function: Callable[[Block], Any], name: str, batch_size: int | None = None, keeps_rows: bool | None = True
    ) -> Self:
        """Return the rows that a function makes of blocks. See :class:`Batched`."""
        batched = Batched(function, name, batch_size, keeps_rows)
        return self._then(partial(OpenDataset.mapped, function=batched))

    def _then(self, operation: Callable[[OpenDataset], OpenDataset]) -> Self:
        return replace(self, _operations=(*self._operations, operation))

    @property
    def reads_files(self) -> bool:
        """True if it needs pyarrow to read files."""
        return getattr(self._make, "func", None) is FileSource

    # -- looking at the rows --------------------------------------------------------------------------------------

    def take(self, limit: int = 20) -> list[Any]:
        """Return the first rows, of epoch 0, as a list of dicts. It reads them in the calling process.

        ::

            print(rows.take(3))
        """
        check_int("limit", limit, minimum=1)
        blocks = self._blocks(limit)
        return list(islice((row for block in blocks for row in to_rows(block)), limit))

    def read(self) -> Block:
        """Return all rows, in the order of epoch 0, as one block. It reads them into the memory of this process."""
        return joined([*self._blocks()] or [self.opened.first(1)])

    def materialize(self) -> Self:
        """Read all rows, in the order of epoch 0, into memory, in the calling process; they are sent to the workers.

        ::

            in_memory = rows.filter(lambda row: row["x"] > 0).materialize()
        """
        return replace(self, _make=partial(MemorySource, self.read()), _operations=(), _shuffle=None)

    def count(self) -> int:
        """Return the number of rows. It opens the files in the calling process. Raises DataError for a stream.

        ::

            steps = rows.count() // 32
        """
        source = self.opened.source
        if isinstance(source, Stream):
            raise DataError("a stream does not know the number of its rows")
        return source.rows

    def schema(self) -> Schema:
        """Return the names and types of the columns.

        ::

            names = rows.schema().names
        """
        return self.opened.schema()

    @cached_property
    def opened(self) -> OpenDataset:
        """The dataset in this process, which opens its source once."""
        made = self._make()
        opened = made if isinstance(made, OpenDataset) else OpenDataset(made)
        for operation in self._operations:
            opened = operation(opened)
        return replace(opened, order=_order(opened.source, *self._shuffle)) if self._shuffle else opened

    def _blocks(self, most: float = math.inf) -> Iterator[Block]:
        """Yield the first rows, and perhaps some more; of a stream, in its own order."""
        source, order = self.opened.source, self.opened.order
        if isinstance(source, Stream):
            found = source.read(int(min(most, ROWS_AT_ONCE)))
        else:
            rows = int(min(most, source.rows))
            found = in_order(source, order, 0, (0, rows), rows)
        return map(self.opened.finished, found)


def _order(source: TableSource | Stream, seed: int, window: int | None) -> RowOrder:
    """Return the order of ``random_shuffle()``. Raises DataError for a stream without a window."""
    if isinstance(source, Stream):
        if window is None:
            raise DataError("a stream cannot be shuffled as a whole: name random_shuffle(buffer_rows=...)")
    elif window is None:
        rows = int(_SHUFFLE_BYTES / max(1.0, source.row_bytes))
        window = 0 if source.is_random else max(_LEAST_SHUFFLED, min(_MOST_SHUFFLED, rows))
    return RowOrder(shuffled=True, window=window, seed=seed)


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
            return OpenDataset(RemadeSource(source, kept.finished), (), self.order)
        rows = (row for block in source.all_blocks() for row in to_rows(self.finished(block)))
        places = np.fromiter((place for place, row in enumerate(rows) if function(row)), dtype=np.int64)
        return replace(self, source=IndexedSource(source, len(places), lambda numbers: places[numbers], "filtered"))

    def part(self, span_of: Callable[[int], Span], seed: int | None) -> OpenDataset:
        """Keep the rows of a span that depends on their number.

        seed: of the random order in which they are counted; None: their own order. Parts with different places in the
            same order have different rows. For a random order, all rows of files are read into memory.
        """
        source = self.source
        if isinstance(source, Stream):
            raise _no_row_count("choose its rows before you pass it to distrain, as with take() and skip() of datasets")
        span = start, stop = span_of(source.rows)
        if seed is None and not source.is_random:
            return replace(self, source=SlicedSource(source, span))
        if not source.is_random:
            source = MemorySource(joined([*source.all_blocks()]))
        order = (lambda numbers: numbers) if seed is None else Permutation(source.rows, seed, "split")
        fact = f"from {start}" if seed is None else f"split {seed} from {start}"
        return replace(self, source=IndexedSource(source, stop - start, lambda numbers: order(numbers + start), fact))

    def _with(self, function: Callable[[Block], Block]) -> OpenDataset:
        return replace(self, functions=(*self.functions, function))


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

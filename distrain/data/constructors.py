"""The functions that make a Dataset of what users have, and the datasets of a run. Runs in: anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from distrain.data.blocks import ITEM, as_block, is_instance, joined
from distrain.data.dataset import Dataset, OpenDataset
from distrain.data.files import FileSource
from distrain.data.iterator import DataIterator
from distrain.data.passes import Worker
from distrain.data.sources import HuggingFaceSource, ItemSource, MemorySource, RangeSource, Stream
from distrain.system.arguments import check_int, check_type


def read_parquet(paths: Any, *, columns: Sequence[str] | None = None) -> Dataset:
    """Return the rows of Parquet files.

    paths: a file, a directory, a glob pattern, or a list of these; paths or URLs of fsspec, on the workers' hosts.
    columns: the columns to read; None for all.

    ::

        distrain.data.read_parquet("s3://bucket/folder", columns=["image", "label"])
    """
    return _files(paths, "parquet", columns)


def read_csv(
    paths: Any,
    *,
    columns: Sequence[str] | None = None,
    read_options: Any = None,
    parse_options: Any = None,
    convert_options: Any = None,
) -> Dataset:
    """Return the rows of CSV files, whose first line has the names of the columns. See :func:`read_parquet`.

    Each worker reads the files once more at the start, to count their rows.

    read_options, parse_options, convert_options: ``ReadOptions``, ``ParseOptions`` and ``ConvertOptions`` of
        ``pyarrow.csv``, for other separators, line breaks in values, or the types of columns.

    ::

        from pyarrow.csv import ParseOptions

        distrain.data.read_csv("folder/*.csv", parse_options=ParseOptions(delimiter=";"))
    """
    if getattr(convert_options, "include_columns", None):
        raise TypeError("read_csv() does not support ConvertOptions(include_columns=...): name them in columns=")
    if getattr(read_options, "skip_rows", 0) and not read_options.column_names:
        raise TypeError("read_csv() does not support ReadOptions(skip_rows=...) without column_names=")
    options = {"read_options": read_options, "parse_options": parse_options, "convert_options": convert_options}
    return _files(paths, "csv", columns, options)


def read_json(
    paths: Any, *, columns: Sequence[str] | None = None, read_options: Any = None, parse_options: Any = None
) -> Dataset:
    """Return the rows of files with one JSON object per line, or of files that are one list. See :func:`read_csv`.

    read_options, parse_options: ``ReadOptions`` and ``ParseOptions`` of ``pyarrow.json``. Texts that look like times
        stay texts, unless ``ParseOptions(explicit_schema=...)`` has another type for the column. With
        ``unexpected_field_behavior="error"``, other columns than these are an error.

    ::

        distrain.data.read_json("rows.jsonl")
    """
    return _files(paths, "json", columns, {"read_options": read_options, "parse_options": parse_options})


def from_items(items: Sequence[Any]) -> Dataset:
    """Return the items of a list as rows. If they aren't dicts, they become the column ``item``.

    ::

        distrain.data.from_items([{"x": 1}, {"x": 2}])
    """
    check_type("items", items, (list, tuple))
    rows = [item if isinstance(item, dict) else {ITEM: item} for item in items]
    return Dataset(partial(MemorySource, rows))


def from_pandas(frame: Any) -> Dataset:
    """Return the rows of a pandas DataFrame, or of a list of them, without the index.

    ::

        distrain.data.from_pandas(pd.DataFrame({"x": [1, 2]}))
    """
    frames = frame if isinstance(frame, list) else [frame]
    if other := [each for each in frames if not is_instance(each, "pandas", "DataFrame")]:
        raise TypeError(f"from_pandas() takes a pandas DataFrame, got {type(other[0]).__name__}")
    blocks = [as_block(each, "from_pandas()") for each in frames]
    return Dataset(partial(MemorySource, joined(blocks)))


def from_numpy(arrays: Any) -> Dataset:
    """Return the rows of a dict of numpy arrays of equal length.

    One array, or a list of arrays, which are joined, become the column ``data``.

    ::

        distrain.data.from_numpy({"x": np.zeros((10, 3)), "y": np.arange(10)})
    """
    parts = arrays if isinstance(arrays, list) else [arrays]
    blocks = [as_block(part if isinstance(part, dict) else {"data": part}, "from_numpy()") for part in parts]
    return Dataset(partial(MemorySource, joined(blocks)))


def from_huggingface(dataset: Any) -> Dataset:
    """Return the rows of a Hugging Face ``Dataset`` or ``IterableDataset``.

    ::

        distrain.data.from_huggingface(datasets.Dataset.from_dict({"x": [1, 2]}))
    """
    found = _of_huggingface(dataset)
    if found is None:
        raise TypeError(f"from_huggingface() takes a datasets.Dataset or IterableDataset, got {type(dataset).__name__}")
    return found


def range(n: int) -> Dataset:
    """Return the numbers below ``n``, in the column ``id``.

    ::

        distrain.data.range(1000)
    """
    check_int("n", n, minimum=1)
    return Dataset(partial(RangeSource, n))


def _files(
    paths: Any, file_format: str | None, columns: Sequence[str] | None = None, options: Mapping[str, Any] | None = None
) -> Dataset:
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given or not all(isinstance(path, (str, os.PathLike)) for path in given):
        raise TypeError(f"expected a path, a URL or a list of these, got {paths!r}")
    if isinstance(columns, str) or (columns is not None and not columns):
        raise TypeError(f"columns must be a list of names, got {columns!r}")
    chosen = {name: value for name, value in (options or {}).items() if value is not None}
    read = None if columns is None else list(columns)
    return Dataset(partial(FileSource, [os.fspath(path) for path in given], file_format, read, chosen))


def _of_huggingface(value: Any) -> Dataset | None:
    if is_instance(value, "datasets", "DatasetDict") or is_instance(value, "datasets", "IterableDatasetDict"):
        raise TypeError(f"a {type(value).__name__} has several datasets: pass one of them, {sorted(value)}")
    if is_instance(value, "datasets", "Dataset"):
        return Dataset(partial(HuggingFaceSource, value))
    if is_instance(value, "datasets", "IterableDataset"):
        return Dataset(partial(Stream, lambda: value))
    return None


# -- what users pass to datasets= ------------------------------------------------------------------------------------


def as_dataset(value: Any, name: str, make: Callable[[], Any] | None = None) -> Dataset:
    """Return what the user passes as ``datasets={name: value}`` as a Dataset. Raises TypeError.

    make: the function of the user's that has made it; of a stream, each epoch makes another one.
    """
    if isinstance(value, Dataset):
        return value
    if (found := _of_huggingface(value)) is not None:
        return found
    if is_instance(value, "torch.utils.data", "DataLoader"):
        raise TypeError(
            f"datasets[{name!r}] is a DataLoader: pass its dataset, or make the DataLoader in train_func and give it "
            "to prepare_data_loader()"
        )
    rows = list(value) if isinstance(value, (list, tuple)) else value
    if isinstance(rows[0] if isinstance(rows, list) and rows else rows, (str, os.PathLike)):
        return _files(value, None)
    is_frame = is_instance(rows, "pyarrow", "Table") or is_instance(rows, "pandas", "DataFrame")
    if isinstance(rows, (list, dict)) or is_frame:
        return Dataset(partial(MemorySource, as_block(rows, f"datasets[{name!r}]")))
    is_stream = is_instance(value, "torch.utils.data", "IterableDataset")
    if hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, type) and not is_stream:
        return Dataset(partial(ItemSource, value))
    if callable(value):
        return Dataset(partial(_called, value, name))
    if make is None and (hasattr(value, "load_state_dict") or hasattr(value, "set_state")):
        raise TypeError(
            f"datasets[{name!r}] has a state of its own, and may begin in the middle: pass a function that makes it, "
            "which each epoch calls; or make a StatefulDataLoader in train_func and give it to prepare_data_loader()"
        )
    if hasattr(value, "__iter__") and not isinstance(value, Set) and (make or not isinstance(value, Iterator)):
        return Dataset(partial(Stream, make or (lambda: value)))
    raise TypeError(
        f"datasets[{name!r}] is a {type(value).__module__}.{type(value).__qualname__}; pass a dataset of "
        "distrain.data, torch or Hugging Face, a pyarrow Table, a pandas DataFrame, a dict of arrays, a list of dicts, "
        "a path or URL of Parquet, CSV or JSON files, or a function that makes one of these on the worker"
    )


def _called(function: Callable[[], Any], name: str) -> OpenDataset:
    """Return what a function of the user's makes."""
    return as_dataset(function(), name, function).opened


# -- the datasets of a run -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunDatasets:
    """The ``datasets=`` of a trainer, and its ``dataset_config=``.

    split: the names of those that are divided among the workers. on_change, resume: see ``DataConfig``.
    """

    by_name: dict[str, Dataset]
    split: frozenset[str]
    on_change: str
    resume: bool

    @property
    def preload(self) -> tuple[str, ...]:
        """The modules that the workers need to read the data, and that may be imported before they are forked."""
        files = any(dataset.reads_files for dataset in self.by_name.values())
        return ("distrain.data.iterator", *(("pyarrow.dataset", "pyarrow.fs") if files else ()))

    def shard(self, name: str, rank: int, ranks: int, **of_loops: Any) -> DataIterator:
        """Return a worker's part of a dataset. ``of_loops``: see :class:`~distrain.data.loops.Loops`."""
        worker = Worker(rank, ranks) if name in self.split else Worker(0, 1)
        return DataIterator(
            self.by_name[name], name=name, worker=worker, rank=rank, on_change=self.on_change, **of_loops
        )


def run_datasets(
    datasets: Mapping[str, Any], split: Collection[str] | str, *, on_change: str, resume: bool
) -> RunDatasets:
    """Return the datasets of a run. Raises TypeError for what isn't a dataset, ValueError for an unknown name."""
    found = {name: as_dataset(value, name) for name, value in datasets.items()}
    names = set(found) if split == "all" else set(split)
    if unknown := names - found.keys():
        raise ValueError(
            f"DataConfig(datasets_to_split=...) names {min(unknown)!r}, but datasets= has {sorted(found) or 'no names'}"
        )
    return RunDatasets(found, frozenset(names), on_change, resume)

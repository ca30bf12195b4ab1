"""``ray.data``: the functions that make datasets, and Ray's options for its execution, which have no effect here.

Runs in: anywhere.
"""

from __future__ import annotations

import io
import os
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distrain import data
from distrain.api import config
from distrain.as_ray.constants import WithoutEffect
from distrain.as_ray.data.arguments import check_options
from distrain.as_ray.data.dataset import Dataset
from distrain.data.constructors import as_dataset
from distrain.data.files import found_files
from distrain.errors import DataError
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_IMAGES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif")


# -- files -----------------------------------------------------------------------------------------------------------


def read_parquet(paths: Any, *, columns: Sequence[str] | None = None, filter: Any = None, **options: Any) -> Dataset:
    """Return the rows of Parquet files. filter: an expression of ``pyarrow.compute`` that is true for them."""
    if filter is None:
        return _shuffled_files("read_parquet", data.read_parquet(paths, columns=columns), options)
    kept = _shuffled_files("read_parquet", data.read_parquet(paths), options).filter(expr=filter)
    return kept if columns is None else kept.select_columns(columns)


def read_csv(
    paths: Any, *, read_options: Any = None, parse_options: Any = None, convert_options: Any = None, **options: Any
) -> Dataset:
    """Return the rows of CSV files."""
    of_arrow = {"read_options": read_options, "parse_options": parse_options, "convert_options": convert_options}
    return _shuffled_files("read_csv", data.read_csv(paths, **of_arrow), options)


def read_json(paths: Any, *, read_options: Any = None, parse_options: Any = None, **options: Any) -> Dataset:
    """Return the rows of files of JSON lines, or of files that are one list."""
    rows = data.read_json(paths, read_options=read_options, parse_options=parse_options)
    return _shuffled_files("read_json", rows, options)


def read_images(
    paths: Any,
    *,
    size: tuple[int, int] | None = None,
    mode: str | None = None,
    include_paths: bool = False,
    **options: Any,
) -> Dataset:
    """Return the images of files, as arrays in the column ``image``. size: their height and width."""
    endings = _endings(options) or _IMAGES

    def files() -> list[tuple[Any, str]]:
        filesystem, found, _ = found_files(_list_of(paths), endings, "images")
        return [(filesystem, path) for path in found]

    def read(file: tuple[Any, str]) -> dict[str, Any]:
        filesystem, path = file
        with _naming(path), filesystem.open(path, "rb") as opened:
            image = require("PIL.Image").open(opened)
            if size is not None:
                image = image.resize((size[1], size[0]))
            row = {"image": np.array(image if mode is None else image.convert(mode))}
        return {**row, "path": path} if include_paths else row

    return _shuffled_files("read_images", as_dataset(files, "read_images()").map(read), options)


def read_text(paths: Any, *, encoding: str = "utf-8", drop_empty_lines: bool = True, **options: Any) -> Dataset:
    """Return the lines of text files, in the column ``text``. Each worker reads them into memory."""
    lines = partial(_lines, paths, encoding, drop_empty_lines, _endings(options) or ("",))
    return _shuffled_files("read_text", as_dataset(lines, "read_text()"), options)


def _shuffled_files(function: str, dataset: data.Dataset, options: dict[str, Any]) -> Dataset:
    """Return a dataset of files after Ray's other arguments: ``shuffle="files"`` shuffles the rows, too."""
    shuffle, endings = options.pop("shuffle", None), _endings(options)
    check_options(function, options)
    make: Any = dataset._make
    found = Dataset.of(replace(dataset, _make=partial(make, endings=endings)) if endings else dataset)
    return found.random_shuffle(seed=getattr(shuffle, "seed", None)) if shuffle else found


def _endings(options: dict[str, Any]) -> tuple[str, ...]:
    """Take ``file_extensions`` out of Ray's arguments, and return the endings of file names."""
    return tuple(f".{ending.lower().lstrip('.')}" for ending in options.pop("file_extensions", None) or ())


def _lines(paths: Any, encoding: str, drop_empty: bool, endings: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the lines of files. They end as those of ``open()`` do, and not at other characters of Unicode."""
    filesystem, found, _ = found_files(_list_of(paths), endings, "text")
    lines: list[str] = []
    for path in found:
        with _naming(path), filesystem.open(path, "rb", compression="infer") as file:
            lines += io.StringIO(file.read().decode(encoding), newline=None)
    return [{"text": line.removesuffix("\n")} for line in lines if line.strip() or not drop_empty]


def _list_of(paths: Any) -> list[str]:
    return [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn the errors of those who read a file's content into a DataError with its path."""
    try:
        yield
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


# -- objects in memory -----------------------------------------------------------------------------------------------


def from_items(items: Sequence[Any], **options: Any) -> Dataset:
    """Return the items of a list as rows. If they aren't dicts, they become the column ``item``."""
    check_options("from_items", options)
    return Dataset.of(data.from_items(list(items)))


def from_pandas(dfs: Any, **options: Any) -> Dataset:
    """Return the rows of a DataFrame, or of a list of them."""
    check_options("from_pandas", options)
    return Dataset.of(data.from_pandas(dfs))


def from_numpy(ndarrays: Any) -> Dataset:
    """Return the rows of an array, or of a list of them, in the column ``data``."""
    return Dataset.of(data.from_numpy(ndarrays))


def from_arrow(tables: Any, **options: Any) -> Dataset:
    """Return the rows of a pyarrow Table, or of a list of them."""
    check_options("from_arrow", options)
    joined = require("pyarrow").concat_tables(tables) if isinstance(tables, list) else tables
    return Dataset.of(as_dataset(joined, "from_arrow()"))


def from_torch(dataset: Any, local_read: bool = False) -> Dataset:
    """Return the items of a dataset of torch, in the column ``item``. local_read: says only where Ray reads them."""
    return Dataset.of(as_dataset(dataset, "from_torch()").map(lambda item: {"item": item}))


def from_huggingface(dataset: Any, **options: Any) -> Dataset:
    """Return the rows of a dataset of Hugging Face."""
    check_options("from_huggingface", options)
    return Dataset.of(data.from_huggingface(dataset))


def range(n: int, **options: Any) -> Dataset:
    """Return the numbers below ``n``, in the column ``id``."""
    check_options("range", options)
    return Dataset.of(data.range(n) if n else data.from_numpy({"id": np.arange(0)}))


# -- execution -------------------------------------------------------------------------------------------------------


class DataConfig(config.DataConfig):
    """``ray.train.DataConfig``."""

    default_ingest_options = WithoutEffect


class DataContext(WithoutEffect):
    """Settings of Ray Data. They may be set, and have no effect."""

    @staticmethod
    @cache
    def get_current() -> DataContext:
        """Return the settings of this process."""
        return DataContext()

"""``ray.data``: the functions that make datasets. Runs in: anywhere."""

from __future__ import annotations

import functools
import inspect
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distrain import data
from distrain.as_ray.data.dataset import Dataset
from distrain.as_ray.sentences import check_options
from distrain.data.constructors import as_dataset
from distrain.data.files import found_files
from distrain.errors import DataError
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_IMAGES = ("png", "jpg", "jpeg", "tif", "tiff", "bmp", "gif")


def _with_options(function: Callable[..., data.Dataset]) -> Callable[..., Dataset]:
    """Return a function with Ray's other arguments. ``shuffle="files"`` shuffles the rows, too.

    filter: an expression of ``pyarrow.compute`` that is true for the rows.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def made(*args: Any, filter: Any = None, shuffle: Any = None, **options: Any) -> Dataset:
        own = {name: options.pop(name) for name in known if name in options}
        columns = own.pop("columns", None) if filter is not None else None  # it may name others
        endings = options.pop("file_extensions", None)
        check_options(function.__name__, options)
        plain = function(*args, **own)
        make: Any = partial(plain._make, endings=_endings(endings)) if endings else plain._make  # type: ignore[call-arg]
        rows = Dataset(make, plain._operations, plain._shuffle)
        rows = rows if filter is None else rows.filter(expr=filter)
        rows = rows if columns is None else rows.select_columns(columns)
        return rows.random_shuffle(seed=getattr(shuffle, "seed", None)) if shuffle else rows

    return made


read_csv, read_json, read_parquet = map(_with_options, (data.read_csv, data.read_json, data.read_parquet))
from_huggingface, from_numpy = map(_with_options, (data.from_huggingface, data.from_numpy))
from_pandas, range = map(_with_options, (data.from_pandas, data.range))


@_with_options
def from_items(items: Sequence[Any]) -> data.Dataset:
    """Return the items of a list as rows. If they aren't dicts, they become the column ``item``."""
    return data.from_items(list(items))


@_with_options
def from_arrow(tables: Any) -> data.Dataset:
    """Return the rows of a pyarrow Table, or of a list of them."""
    return as_dataset(require("pyarrow").concat_tables(tables) if isinstance(tables, list) else tables, "from_arrow()")


@_with_options
def from_torch(dataset: Any, local_read: bool = False) -> data.Dataset:
    """Return the items of a dataset of torch, in the column ``item``. local_read: says only where Ray reads them."""
    return as_dataset(dataset, "from_torch()").map(lambda item: {"item": item})


@_with_options
def read_images(
    paths: Any,
    *,
    size: tuple[int, int] | None = None,
    mode: str | None = None,
    include_paths: bool = False,
    file_extensions: Sequence[str] | None = None,
) -> data.Dataset:
    """Return the images of files, as arrays in the column ``image``. size: their height and width."""
    given = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    endings = _endings(file_extensions or _IMAGES)

    def files() -> list[tuple[Any, str]]:
        filesystem, found, _ = found_files(given, endings, "images")
        return [(filesystem, path) for path in found]

    def row(file: tuple[Any, str]) -> dict[str, Any]:
        filesystem, path = file
        try:
            with filesystem.open(path, "rb") as opened:
                image = require("PIL.Image").open(opened)
                image = image if size is None else image.resize((size[1], size[0]))
                array = np.array(image if mode is None else image.convert(mode))
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"cannot read {path}: {error}") from error
        return {"image": array, "path": path} if include_paths else {"image": array}

    return as_dataset(files, "read_images()").map(row)


def _endings(extensions: Sequence[str]) -> tuple[str, ...]:
    """Return the endings of file names with Ray's ``file_extensions``."""
    return tuple(f".{ending.lower().lstrip('.')}" for ending in extensions)

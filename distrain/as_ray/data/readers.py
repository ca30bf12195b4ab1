"""``ray.data``: the functions that make datasets, and Ray's options for its execution, which have no effect here.

Runs in: anywhere.
"""

from __future__ import annotations

import io
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import fsspec
import numpy as np

from distrain import data
from distrain.as_ray.data.arguments import FSSPEC, check_options
from distrain.as_ray.data.dataset import Dataset
from distrain.data.blocks import ITEM, joined
from distrain.data.constructors import as_dataset
from distrain.data.files import format_of, found_files
from distrain.errors import DataError
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_OF_FILES = (
    "arrow_open_file_args",
    "arrow_open_stream_args",
    "catalog",
    "file_extensions",
    "filesystem",
    "ignore_missing_paths",
    "include_paths",
    "include_row_hash",
    "meta_provider",
    "partition_filter",
    "partitioning",
    "shuffle",
    "skip_paths",
    "tensor_column_schema",
)
"""Arguments of Ray's functions that read files."""
_IMAGES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif")


# -- files -----------------------------------------------------------------------------------------------------------


def read_parquet(paths: Any, *, columns: Sequence[str] | None = None, **options: Any) -> Dataset:
    """Return the rows of Parquet files."""
    return _shuffled_files("read_parquet", data.read_parquet(_list_of(paths), columns=columns), options)


def read_csv(
    paths: Any, *, read_options: Any = None, parse_options: Any = None, convert_options: Any = None, **options: Any
) -> Dataset:
    """Return the rows of CSV files."""
    of_arrow = {"read_options": read_options, "parse_options": parse_options, "convert_options": convert_options}
    return _shuffled_files("read_csv", data.read_csv(_list_of(paths), **of_arrow), options)


def read_json(
    paths: Any, *, lines: bool = False, read_options: Any = None, parse_options: Any = None, **options: Any
) -> Dataset:
    """Return the rows of files of JSON lines. If the first one has a JSON array, each worker reads all into memory."""
    if _has_array(paths):
        rows = as_dataset(partial(_json_rows, paths), "read_json()")
    else:
        rows = data.read_json(_list_of(paths), read_options=read_options, parse_options=parse_options)
    return _shuffled_files("read_json", rows, options)


def read_images(
    paths: Any,
    *,
    size: tuple[int, int] | None = None,
    mode: str | None = None,
    include_paths: bool = False,
    partitioning: Partitioning | None = None,
    file_extensions: Sequence[str] = _IMAGES,
    **options: Any,
) -> Dataset:
    """Return the images of files, as arrays in the column ``image``. size: their height and width."""
    read = partial(_image, size=size, mode=mode)
    rows = partial(_rows_of_files, paths, file_extensions, read, "image", include_paths, partitioning)
    return _shuffled_files("read_images", as_dataset(rows, "read_images()"), options)


def read_binary_files(
    paths: Any,
    *,
    include_paths: bool = False,
    partitioning: Partitioning | None = None,
    file_extensions: Sequence[str] | None = None,
    **options: Any,
) -> Dataset:
    """Return the contents of files, in the column ``bytes``; decompressed if they are compressed."""
    rows = partial(_rows_of_files, paths, file_extensions, _unchanged, "bytes", include_paths, partitioning)
    return _shuffled_files("read_binary_files", as_dataset(rows, "read_binary_files()"), options)


def read_text(paths: Any, *, encoding: str = "utf-8", drop_empty_lines: bool = True, **options: Any) -> Dataset:
    """Return the lines of text files, in the column ``text``. Each worker reads them into memory."""
    lines = partial(_lines, paths, encoding, drop_empty_lines)
    return _shuffled_files("read_text", as_dataset(lines, "read_text()"), options)


def read_numpy(paths: Any, **options: Any) -> Dataset:
    """Return the rows of ``.npy`` files, in the column ``data``. Each worker reads them into memory."""
    return _shuffled_files("read_numpy", as_dataset(partial(_arrays, paths), "read_numpy()"), options)


def _shuffled_files(function: str, dataset: data.Dataset, options: dict[str, Any]) -> Dataset:
    """Return a dataset of files after Ray's other arguments: ``shuffle="files"`` shuffles the rows, too."""
    shuffle = options.pop("shuffle", None)
    check_options(function, options, _OF_FILES)
    return Dataset.of(dataset.random_shuffle(seed=getattr(shuffle, "seed", None)) if shuffle else dataset)


@dataclass(frozen=True)
class Partitioning:
    """The columns that the folders of files stand for: ``hive`` (``column=value``), or ``dir`` (``field_names``)."""

    style: str
    base_dir: str = ""
    field_names: Sequence[str] | None = None

    def columns(self, path: str) -> dict[str, str]:
        """Return the columns of a file."""
        base = fsspec.core.url_to_fs(self.base_dir)[1] if self.base_dir else "/"
        folders = PurePosixPath(os.path.relpath(path, base)).parts[:-1]
        if self.style == "hive":
            return dict(folder.split("=", 1) for folder in folders if "=" in folder)
        return dict(zip(self.field_names or (), folders, strict=True))


@dataclass(frozen=True)
class _Files:
    """A row for each file, which is read when the row is asked for."""

    filesystem: Any
    paths: list[str]
    read: Callable[[bytes], Any]
    column: str
    include_paths: bool
    partitioning: Partitioning | None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> dict[str, Any]:
        path = self.paths[place]
        with _naming(path):
            row = {self.column: self.read(_content_of(self.filesystem, path))}
        if self.partitioning is not None:
            row |= self.partitioning.columns(path)
        return {**row, "path": path} if self.include_paths else row


def _rows_of_files(paths: Any, endings: Sequence[str] | None, *how: Any) -> _Files:
    return _Files(*_find(paths, endings), *how)


def _find(paths: Any, endings: Sequence[str] | None = None) -> tuple[Any, list[str]]:
    wanted = None if endings is None else tuple(f".{ending.lstrip('.')}" for ending in endings)
    return found_files(
        _list_of(paths),
        lambda path: wanted is None or path.lower().endswith(wanted),
        ", ".join(wanted or ("readable",)),
    )


def _find_json(paths: Any) -> tuple[Any, list[str]]:
    return found_files(_list_of(paths), lambda path: format_of(path) == "json", "JSON")


def _list_of(paths: Any) -> list[str]:
    """Return paths as a list. Raises ValueError for URLs that only Ray knows."""
    given = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if own := [path for path in given if "://anonymous@" in path]:
        raise ValueError(f"{own[0]}: leave 'anonymous@' out: {FSSPEC}")
    return given


def _image(content: bytes, size: tuple[int, int] | None, mode: str | None) -> Any:
    try:
        image = require("PIL.Image").open(io.BytesIO(content))
    except require("PIL").UnidentifiedImageError:
        raise ValueError("it is not an image, or one of a kind that Pillow does not know") from None
    if size is not None:
        image = image.resize((size[1], size[0]))
    return np.array(image if mode is None else image.convert(mode))


def _unchanged(content: bytes) -> bytes:
    return content


def _lines(paths: Any, encoding: str, drop_empty: bool) -> list[dict[str, str]]:
    """Return the lines of files. They end as those of ``open()`` do, and not at other characters of Unicode."""
    filesystem, found = _find(paths)
    lines: list[str] = []
    for path in found:
        with _naming(path):
            lines += io.StringIO(_content_of(filesystem, path).decode(encoding), newline=None)
    return [{"text": line.removesuffix("\n")} for line in lines if line.strip() or not drop_empty]


def _arrays(paths: Any) -> Any:
    filesystem, found = _find(paths, (".npy",))
    blocks = []
    for path in found:
        with _naming(path):
            blocks.append({"data": np.load(io.BytesIO(_content_of(filesystem, path)))})
    return joined(blocks)


def _has_array(paths: Any) -> bool:
    """Return whether the first file has a JSON array."""
    filesystem, found = _find_json(paths)
    with _opened(filesystem, found[0]) as file:
        return bool(file.read(64).lstrip().startswith(b"["))


def _json_rows(paths: Any) -> list[Any]:
    """Return the rows of files with an array or with lines. A key that other rows have is None."""
    filesystem, found = _find_json(paths)
    rows = [row for path in found for row in _json_rows_of(_content_of(filesystem, path), path)]
    names = {name: None for row in rows if isinstance(row, dict) for name in row}
    return [{**names, **row} if isinstance(row, dict) else {ITEM: row} for row in rows]


def _json_rows_of(content: bytes, path: str) -> list[Any]:
    with _naming(path):
        if content.lstrip().startswith(b"["):
            return list(json.loads(content))
        return [json.loads(line) for line in content.split(b"\n") if line.strip()]


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn the errors of those who read a file's content into a DataError with its path."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _content_of(filesystem: Any, path: str) -> bytes:
    with _opened(filesystem, path) as file:
        return bytes(file.read())


def _opened(filesystem: Any, path: str) -> Any:
    """Return an open file, which decompresses what it reads if the name says so."""
    pa, file = require("pyarrow"), filesystem.open(path, "rb")
    try:
        codec = pa.Codec.detect(path).name
    except (TypeError, ValueError):  # the file is not compressed
        return file
    return pa.input_stream(file, compression=codec)


# -- objects in memory -----------------------------------------------------------------------------------------------


def from_items(items: Sequence[Any], **options: Any) -> Dataset:
    """Return the items of a list as rows. If they are no dicts, they become the column ``item``."""
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
    """Return the items of a dataset of torch, in the column ``item``."""
    return Dataset.of(as_dataset(dataset, "from_torch()").map(lambda item: {"item": item}))


def from_huggingface(dataset: Any, **options: Any) -> Dataset:
    """Return the rows of a dataset of Hugging Face."""
    check_options("from_huggingface", options)
    return Dataset.of(data.from_huggingface(dataset))


def range(n: int, **options: Any) -> Dataset:
    """Return the numbers below ``n``, in the column ``id``."""
    check_options("range", options)
    return Dataset.of(data.range(n) if n else data.from_numpy({"id": np.arange(0)}))


def range_tensor(n: int, *, shape: tuple[int, ...] = (1,), **options: Any) -> Dataset:
    """Return arrays that are filled with the numbers below ``n``, in the column ``data``."""
    check_options("range_tensor", options)

    def filled(batch: dict[str, Any]) -> dict[str, Any]:
        ids = batch["id"]
        return {"data": np.broadcast_to(ids.reshape(-1, *(1 for _ in shape)), (len(ids), *shape)).copy()}

    return Dataset.of(data.range(n).map_batches(filled))


# -- execution -------------------------------------------------------------------------------------------------------


@dataclass
class ExecutionResources:
    """The resources that Ray's execution may use. They have no effect: workers read the data themselves."""

    cpu: float | None = None
    gpu: float | None = None
    object_store_memory: float | None = None
    memory: float | None = None


@dataclass
class ExecutionOptions:
    """Options of Ray's execution. They have no effect."""

    resource_limits: ExecutionResources = field(default_factory=ExecutionResources)
    exclude_resources: ExecutionResources = field(default_factory=ExecutionResources)
    locality_with_output: bool | list[str] = False
    preserve_order: bool = False
    actor_locality_enabled: bool = True
    verbose_progress: bool = False


class DataContext:
    """Settings of Ray Data. They may be set, and have no effect."""

    _current: ClassVar[DataContext | None] = None

    def __init__(self) -> None:
        self.execution_options = ExecutionOptions()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"DataContext has no {name!r} here, as distrain has no such setting; it may be set")

    @classmethod
    def get_current(cls) -> DataContext:
        """Return the settings of this process."""
        cls._current = cls._current or cls()
        return cls._current


class ActorPoolStrategy:
    """Choice of the place where Ray calls functions, without effect: the workers call them."""

    def __init__(self, *args: object, **options: object) -> None:
        """Take the arguments of Ray."""


class TaskPoolStrategy(ActorPoolStrategy):
    """Choice of the place where Ray calls functions, without effect: the workers call them."""

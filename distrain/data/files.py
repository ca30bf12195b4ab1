"""Files of Parquet, CSV and JSON lines, read by pyarrow. Runs in: worker.

The row groups of Parquet files are blocks. CSV and JSON files are blocks, which are read at the start, too: to count
their rows, to find all columns of JSON, and to see that no integer becomes a float that differs.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from distrain.data.blocks import rows_after
from distrain.data.sources import Schema, TableSource
from distrain.errors import DataError
from distrain.system.imports import find_filesystem, require
from distrain.system.log import say
from distrain.system.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distrain.data.blocks import Block
    from distrain.data.order import Indices

SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
"""By ending of a file name: pyarrow's name of the format."""
_COMPRESSED = (".gz", ".bz2", ".zst")
_SCAN_BYTES = 8 << 20
"""Memory of one batch of the scanner, about; it reads a few ahead."""
_SCAN_ROWS = 1 << 16
_SAMPLED_ROWS = 1024
_FOOTERS_AT_ONCE = 16
_LOOK_BYTES = 64
_TEXT_BYTES = 16 << 20
"""Bytes of a file of JSON lines whose columns are found at a time."""
_INTEGER = re.compile(rb"(?<![\d.eE])-?\d{16,}(?![\d.eE])")
_PATTERN = re.compile(r"[*?[]")


@dataclass(eq=False)
class FileSource(TableSource):
    """Files of one format.

    paths: files, directories and glob patterns, local or URLs of fsspec.
    file_format: ``parquet``, ``csv`` or ``json``; None: the files' names tell it.
    columns: the columns to read; None for all.
    options: of pyarrow's class for the format.
    endings: of the files that are read of a directory, instead of those that the format usually has.
    """

    paths: Sequence[str]
    file_format: str | None
    columns: list[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    endings: tuple[str, ...] = ()

    # -- files and blocks -----------------------------------------------------------------------------------------

    @cached_property
    def _files(self) -> tuple[Any, list[str]]:
        """The filesystem and the sorted paths of all files. Raises DataError if there are none."""
        given, endings = self.file_format, self.endings
        if endings:
            return found_files(self.paths, lambda file: file.lower().endswith(endings), " or ".join(endings))
        formats = [given] if given else SUFFIXES.values()
        return found_files(self.paths, lambda file: format_of(file) in formats, given or "Parquet, CSV or JSON")

    @cached_property
    def _dataset(self) -> Any:
        """The files as a ``pyarrow.dataset.Dataset``."""
        filesystem, files = self._files
        formats = {self.file_format or format_of(file): file for file in files}
        if None in formats:
            raise DataError(f"{formats[None]} has no known ending: use read_parquet(), read_csv() or read_json()")
        if len(formats) > 1:
            raise DataError(f"the files have several formats; read each by itself: {', '.join(formats.values())}")
        kind = str(*formats)
        fs, datasets = require("pyarrow.fs"), require("pyarrow.dataset")
        try:
            if kind == "json" and _json_of(filesystem, files[0], _LOOK_BYTES)[:1] == b"[":
                filesystem = _ListsAsLines(filesystem)
            is_local = isinstance(filesystem, LocalFileSystem)
            arrow_filesystem = fs.LocalFileSystem() if is_local else fs.PyFileSystem(fs.FSSpecHandler(filesystem))
            form = getattr(datasets, f"{kind.capitalize()}FileFormat")(**self.options)
            options = datasets.FileSystemFactoryOptions(
                partition_base_dir=self._root(filesystem), partitioning=datasets.HivePartitioning.discover()
            )
            return datasets.FileSystemDatasetFactory(arrow_filesystem, files, form, options).finish()
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"cannot read {files[0]}: {error}") from error

    def _root(self, filesystem: Any) -> str:
        """Return the directory below which ``key=value`` in a path is a column."""
        return os.path.commonpath([_fixed(filesystem, _located(given)[1]) for given in self.paths])

    @cached_property
    def _opened(self) -> list[tuple[Any, Any, list[tuple[Any, int, int]]]]:
        """Each file, its columns, and its blocks with the number of rows and bytes of each."""
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as threads:
            return list(threads.map(self._open, self._dataset.get_fragments()))

    def _open(self, fragment: Any) -> tuple[Any, Any, list[tuple[Any, int, int]]]:
        try:
            if hasattr(fragment, "row_groups"):
                groups = [(group.id, group.num_rows, group.total_byte_size) for group in fragment.row_groups]
                parts = [(fragment.subset(row_group_ids=[number]), *sizes) for number, *sizes in groups]
                return fragment, fragment.physical_schema, parts
            if self._is_json:
                own, rows = self._read_json(fragment)
            else:  # pyarrow is quick to count rows, but ignores some of its options
                own = fragment.physical_schema
                counts = (batch.num_rows for batch in fragment.to_batches(columns=[]))
                rows = sum(counts) if self.options else int(fragment.count_rows())
            return fragment, own, [(fragment, rows, self._files[0].size(fragment.path) or 0)]
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {fragment.path}: {error}") from error

    @property
    def _is_json(self) -> bool:
        return bool(self._dataset.format.default_extname == "json")

    def _read_json(self, fragment: Any) -> tuple[Any, int]:
        """Return the columns of a whole file of JSON lines, and the number of its rows."""
        pa, rows, found = require("pyarrow"), 0, require("pyarrow").schema([])
        for text in self._texts(fragment):
            table = require("pyarrow.json").read_json(pa.BufferReader(text), **self.options)
            own = [field.with_type(_without_times(field.type)) for field in table.schema]
            rows, found = rows + len(table), pa.unify_schemas([found, pa.schema(own)], promote_options="permissive")
        return found, rows

    def _json_tables(self, fragment: Any, schema: Any) -> Iterator[Any]:
        """Yield these columns of a file of JSON lines.

        pyarrow's scanner looks for columns in the first megabyte only, and does not read a row without a line end.
        """
        pa, reader, parse = require("pyarrow"), require("pyarrow.json"), self.options.get("parse_options")
        keys = {name: value for name, value in _partitions(fragment).items() if name in schema.names}
        own = pa.schema([field for field in schema if field.name not in keys])
        options = reader.ParseOptions(own, parse and parse.newlines_in_values, "ignore")
        for text in self._texts(fragment):
            table = reader.read_json(pa.BufferReader(text), self.options.get("read_options"), options)
            for name, value in keys.items():
                table = table.append_column(name, pa.array([value] * len(table), schema.field(name).type))
            yield table.select(schema.names)

    def _texts(self, fragment: Any) -> Iterator[bytes]:
        """Yield the lines of a file, many at once; all if an object may have several lines."""
        kept, options = b"", self.options.get("parse_options")
        size = None if options and options.newlines_in_values else _TEXT_BYTES
        with self._dataset.filesystem.open_input_stream(fragment.path, compression="detect") as file:
            while read := file.read(size):
                text, end, kept = (kept + read).rpartition(b"\n") if size else (read, b"", b"")
                if text.strip():
                    yield text + end
        if kept.strip():
            yield kept

    @cached_property
    def _blocks(self) -> tuple[list[Any], Indices, float]:
        """The blocks, the number of rows of each, and the bytes of all of them."""
        parts = [part for *_, found in self._opened for part in found]
        rows = np.array([count for _, count, _ in parts], dtype=np.int64)
        return [fragment for fragment, _, _ in parts], rows, float(sum(size for _, _, size in parts))

    @cached_property
    def _schema(self) -> Any:
        """The columns that are read, of all files. One that a file lacks has no values there, and a line says so.

        Raises DataError if a column has types that have no type for the values of both.
        """
        pa, whole, holders = require("pyarrow"), self._dataset, defaultdict[str, list[str]](list)
        fields: dict[str, Any] = {}
        promote = "default" if whole.format.default_extname == "parquet" else "permissive"
        for fragment, schema, _ in self._opened:
            path, keys = fragment.path, _partitions(fragment)
            for name in keys:
                holders[name].append(path)
            for own in schema:
                name, known = own.name, fields.setdefault(own.name, own)
                if self.columns and name not in self.columns:
                    continue
                if name in keys:
                    raise DataError(
                        f"column {name!r} is in {path}, and comes from the name of its directory, too; rename one of "
                        "them"
                    )
                try:
                    if own.type != known.type:
                        both = [pa.schema([known]), pa.schema([own])]
                        fields[name] = pa.unify_schemas(both, promote_options=promote).field(0)
                except (TypeError, ValueError) as error:
                    raise DataError(
                        f"column {name!r} is {known.type} in {holders[name][0]}, but {own.type} in {path}; convert the "
                        "files to the same columns, or leave the column out with columns="
                    ) from error
                holders[name].append(path)
        parts = {name for fragment, *_ in self._opened for name in _partitions(fragment)}
        fields |= {field.name: field for field in whole.schema if field.name in parts}
        fields |= self._chosen
        for name in self.columns or fields:
            if name not in fields:
                raise DataError(f"there is no column {name!r} in {', '.join(self.paths)}; there are {[*fields]}")
            if os.environ.get("RANK", "0") == "0" and (gaps := {*self._files[1]} - {*holders[name]}):
                say(f"column {name!r} is missing in {_some(sorted(gaps))}; rows from there have no value")
        found = pa.schema([fields[name] for name in self.columns or fields], whole.schema.metadata)
        if promote == "permissive":
            self._check_digits(found)
        return found

    @cached_property
    def _chosen(self) -> dict[str, Any]:
        """The columns of text files whose types the user has chosen."""
        explicit = getattr(self.options.get("parse_options"), "explicit_schema", None)
        types = getattr(self.options.get("convert_options"), "column_types", {})
        return {field.name: field for field in [*(explicit or ()), *require("pyarrow").schema(types)]}

    def _check_digits(self, schema: Any) -> None:
        """Raise DataError for a text file with an integer that would lose digits because its column has floats."""
        floats = [field for field in schema if "double" in str(field.type) and field.name not in self._chosen]
        for fragment, own, _ in self._opened if floats else ():
            read = require("pyarrow").schema([field for field in floats if field.name in own.names])
            tables = self._tables(fragment, read, _SCAN_ROWS)
            large = {value: name for table in tables for name in read.names for value in _large(table[name])}
            for text in self._texts(fragment) if large else ():
                for number in map(int, _INTEGER.findall(text)):
                    if (name := large.get(float(number))) and number != float(number):
                        raise DataError(
                            f"column {name!r} has floats and the integer {number} in {fragment.path}, which would lose "
                            "digits; choose the type of the column, such as pa.uint64(), pa.decimal128(38) or "
                            "pa.float64(), with ParseOptions(explicit_schema=...) for JSON, and "
                            "ConvertOptions(column_types=...) for CSV"
                        )

    @property
    def block_rows(self) -> Indices:
        return self._blocks[1]

    @cached_property
    def row_bytes(self) -> float:
        """The size of a row in files, or that of the first rows in memory, which may be much larger."""
        first = next((block for block, rows in enumerate(self.block_rows) if rows), None)
        if first is None:
            return 0
        sample = next(self._tables(self._blocks[0][first], self._schema, _SAMPLED_ROWS)).slice(0, _SAMPLED_ROWS)
        # The order of the rows depends on this size. So it must not change with each version of pyarrow.
        in_memory = 2.0 ** math.ceil(math.log2(max(1, sample.nbytes / sample.num_rows)))
        return max(in_memory, self._blocks[2] / self.rows)

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, blocks: Sequence[int], skip: int, count: int) -> Iterator[Block]:
        size = int(min(_SCAN_ROWS, max(1, _SCAN_BYTES / max(1.0, self.row_bytes))))
        for block in blocks:
            fragment, taken = self._blocks[0][block], min(count, int(self.block_rows[block]) - skip)
            left = taken
            for rows in rows_after(self._tables(fragment, self._schema, size), skip, taken):
                yield rows
                left -= rows.num_rows
            if left:
                raise DataError(f"{_name(fragment)} has {left} fewer rows than when it was opened: it has changed")
            count, skip = count - taken, 0
            if not count:
                return

    def _tables(self, fragment: Any, schema: Any, size: int) -> Iterator[Any]:
        """Yield these columns of a file or row group. ``size``: the most rows of a table, unless it is of JSON."""
        whole, table_of = self._dataset, require("pyarrow").Table.from_batches
        try:
            if self._is_json:
                yield from self._json_tables(fragment, schema)
                return
            chosen = require("pyarrow.dataset").FileSystemDataset([fragment], schema, whole.format, whole.filesystem)
            for batch in chosen.to_batches(batch_size=size, batch_readahead=4):
                yield table_of([batch])
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"cannot read {_name(fragment)}: {error}") from error

    # -- facts ----------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        names = [PurePosixPath(file).name for file in self._files[1]]
        return {
            "rows": self.rows,
            "files": len(names),
            "bytes": self._blocks[2],
            "names": names,
            "blocks": self.block_rows.tolist(),
        }

    def schema(self) -> Schema:
        return Schema(self._schema.names, self._schema.types)


def _json_of(filesystem: Any, path: str, most: int = -1) -> bytes:
    """Return a JSON file, or its first bytes, without what may come before the first value."""
    with filesystem.open(path, "rb") as file:
        found: bytes = file.read(most).removeprefix(codecs.BOM_UTF8).lstrip()
    return found


class _ListsAsLines:
    """A filesystem of fsspec whose JSON files are lines, although some are one list. Those are read as a whole."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, path: str, mode: str = "rb") -> io.BytesIO:
        found = _json_of(self._inner, path)
        lines = "".join(f"{json.dumps(row)}\n" for row in json.loads(found)).encode() if found[:1] == b"[" else found
        return io.BytesIO(lines)


def found_files(paths: Sequence[str], is_wanted: Callable[[str], bool], kinds: str) -> tuple[Any, list[str]]:
    """Return the filesystem of paths and patterns, and all their files; of directories, those that are wanted, sorted.

    kinds: names those that are wanted. Raises DataError if there are none.
    """
    systems = [_located(given) for given in paths]
    filesystem = systems[0][0]
    found: list[str] = []
    for given, (other, path) in zip(paths, systems, strict=True):
        if other != filesystem:
            raise DataError(f"{paths[0]} and {given} are on different filesystems; read each by itself")
        files = _files_in(_Following() if isinstance(other, LocalFileSystem) else other, path, given)
        folder = _fixed(filesystem, path)
        visible = [file for file in sorted(files) if file == path or _is_visible(file, folder, path)]
        chosen = [file for file in visible if file == path or is_wanted(file)]
        if not chosen:
            raise DataError(f"{given} has no {kinds} files, but {count(len(visible), 'other')}")
        found += chosen
    return filesystem, found


def _fixed(filesystem: Any, path: str) -> str:
    """Return the directory below which a path or pattern finds its files."""
    fixed = path if filesystem.exists(path) else _PATTERN.split(path)[0]
    return fixed if filesystem.isdir(fixed) else os.path.dirname(fixed)


def _located(given: str) -> tuple[Any, str]:
    """Return the filesystem of a path or URL, and the path there. In the name of a local file, ``::`` means nothing."""
    if "::" in given and "://" not in given:
        return LocalFileSystem(), os.path.abspath(given)
    try:
        filesystem, path = find_filesystem(given)
    except ValueError as error:
        raise DataError(f"cannot read {given}: {error}") from error
    return filesystem, path


class _Following(LocalFileSystem):  # type: ignore[misc, unused-ignore]
    """The local files, with linked directories among the directories. A link to a directory above it is not."""

    def info(self, path: Any, **options: Any) -> dict[str, Any]:
        """Return facts about a path, about its target if it is a link."""
        found: dict[str, Any] = super().info(path, **options)
        if found["islink"]:
            name = found["name"]
            if os.path.isfile(name):
                found["type"] = "file"
            elif os.path.isdir(name) and not any(os.path.samefile(name, above) for above in PurePath(name).parents):
                found["type"] = "directory"
        return found


def _files_in(filesystem: Any, path: str, given: str) -> set[str]:
    """Return a file, or those in a directory or of a pattern. Raises DataError if there are none."""
    if filesystem.isfile(path):  # the cheapest question to a server
        return {path}
    if filesystem.isdir(path):
        return set(filesystem.find(path))
    if not _PATTERN.search(path):
        raise DataError(f"there is no file or directory {given}")
    found: set[str] = set()
    for name, about in filesystem.glob(path, detail=True).items():
        found |= set(filesystem.find(name)) if about["type"] == "directory" else {name}
    if not found:
        raise DataError(f"no file matches {given}")
    return found


def format_of(path: str) -> str | None:
    """Return pyarrow's name of the format of a file, which its name tells, or None."""
    stem, suffix = os.path.splitext(path.lower())
    return SUFFIXES.get(os.path.splitext(stem)[1] if suffix in _COMPRESSED else suffix)


def _is_visible(file: str, folder: str, pattern: str) -> bool:
    """Return whether no part of the path below ``folder`` begins with a dot or an underscore, as in Spark's folders.

    ``_column=value`` is a column, and a pattern may name what it wants.
    """
    named = [part for part in pattern.split("/") if part[:1] in (".", "_")]
    hidden = (part for part in os.path.relpath(file, folder).split("/") if part[:1] in (".", "_"))
    return all((part[0] == "_" and "=" in part) or any(fnmatchcase(part, name) for name in named) for part in hidden)


def _name(fragment: Any) -> str:
    groups = getattr(fragment, "row_groups", None)
    return f"{fragment.path}, row group {groups[0].id}" if groups else str(fragment.path)


def _partitions(fragment: Any) -> dict[str, Any]:
    return dict(require("pyarrow.dataset").get_partition_keys(fragment.partition_expression))


def _some(files: list[str]) -> str:
    """Return the names of a few of these files, and the number of the others."""
    others = f" and {count(len(files) - 3, 'other')}" if len(files) > 3 else ""
    return ", ".join(files[:3]) + others


def _without_times(kind: Any) -> Any:
    """Return a type that pyarrow has chosen for values of JSON, with text for texts that look like times."""
    pa = require("pyarrow")
    if pa.types.is_list(kind):
        return pa.list_(_without_times(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_times(field.type)) for field in kind])
    return pa.string() if pa.types.is_timestamp(kind) else kind


def _large(column: Any) -> list[float]:
    """Return the floats of a column of Arrow of which some may have been other integers."""
    pa, compute = require("pyarrow"), require("pyarrow.compute")
    if pa.types.is_struct(column.type):
        return [value for inner in column.flatten() for value in _large(inner)]
    if pa.types.is_list(column.type):
        return _large(compute.list_flatten(column))
    if not pa.types.is_floating(column.type):
        return []
    found: list[float] = column.filter(compute.greater_equal(compute.abs(column), 2.0**53)).unique().to_pylist()
    return found

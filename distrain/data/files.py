"""Files of Parquet, CSV and JSON lines, read by pyarrow. Runs in: worker.

The row groups of Parquet files are blocks. CSV and JSON files are blocks, which are read at the start, too: to count
their rows, to find all columns of JSON, and to see that no integer becomes a float that differs.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import re
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from distrain.data.blocks import Block, rows_after
from distrain.data.sources import Schema, TableSource
from distrain.errors import DataError
from distrain.system.background import in_threads
from distrain.system.imports import find_filesystem, require
from distrain.system.log import say
from distrain.system.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distrain.data.order import Indices

_KINDS = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
_ENDINGS = {f"{name}{packed}": kind for name, kind in _KINDS.items() for packed in ("", ".gz", ".bz2", ".zst")}
"""By ending of a file name: pyarrow's name of the format."""
_SCAN_BYTES = 8 << 20
"""Memory of one batch of the scanner, about; it reads a few ahead."""
_SCAN_ROWS = 1 << 16
_SAMPLED_ROWS = 1024
_FOOTERS_AT_ONCE = 16
_TEXT_BYTES = 16 << 20
"""Bytes of a file of JSON lines that are read at a time."""
_INTEGER = re.compile(rb"(?<![\d.eE])-?\d{16,}(?![\d.eE])")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_PATTERN = re.compile(r"[*?[]")


class _Part(NamedTuple):
    """A block, and its size."""

    fragment: Any
    rows: int
    size: int


class _File(NamedTuple):
    """A file, its own columns, those that come from names of directories, and its blocks."""

    fragment: Any
    schema: Any
    keys: dict[str, Any]
    parts: list[_Part]


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
    def _found(self) -> Found:
        formats = [self.file_format] if self.file_format else [*dict.fromkeys(_KINDS.values())]
        endings = self.endings or tuple(ending for ending, kind in _ENDINGS.items() if kind in formats)
        return found_files(self.paths, endings, " or ".join(self.endings or formats))

    @cached_property
    def _kind(self) -> str:
        """The format of all files."""
        formats = {self.file_format or _format_of(file): file for file in self._found.files}
        if None in formats:
            raise DataError(f"{formats[None]} has no known ending: use read_parquet(), read_csv() or read_json()")
        if len(formats) > 1:
            raise DataError(f"the files have several formats; read each by itself: {', '.join(formats.values())}")
        return str(*formats)

    @cached_property
    def _dataset(self) -> tuple[Any, Any]:
        """The files as a ``pyarrow.dataset.Dataset``, and the columns that come from ``key=value`` in their paths."""
        fs, datasets, (filesystem, files, root) = require("pyarrow.fs"), require("pyarrow.dataset"), self._found
        is_local = isinstance(filesystem, LocalFileSystem)
        keys = _keys_of([os.path.relpath(os.path.dirname(file), root) for file in files])
        hive = datasets.HivePartitioning(keys)
        options = datasets.FileSystemFactoryOptions(partition_base_dir=root, partitioning=hive)
        try:
            arrow_filesystem = fs.LocalFileSystem() if is_local else fs.PyFileSystem(fs.FSSpecHandler(filesystem))
            form = getattr(datasets, f"{self._kind.capitalize()}FileFormat")(**self.options)
            return datasets.FileSystemDatasetFactory(arrow_filesystem, files, form, options).finish(keys), keys
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"cannot read {files[0]}: {error}") from error

    @cached_property
    def _files(self) -> list[_File]:
        return in_threads(self._open, list(self._dataset[0].get_fragments()), threads=_FOOTERS_AT_ONCE)

    def _open(self, fragment: Any) -> _File:
        keys = require("pyarrow.dataset").get_partition_keys(fragment.partition_expression)
        with _naming(fragment.path):
            if self._kind == "parquet":
                groups = [(part, part.row_groups[0]) for part in fragment.split_by_row_group()]
                parts = [_Part(part, group.num_rows, group.total_byte_size) for part, group in groups]
                return _File(fragment, fragment.physical_schema, keys, parts)
            if self._kind == "json":
                own, rows = self._read_json(fragment)
            else:  # pyarrow is quick to count rows, but ignores some of its options
                own = fragment.physical_schema
                counts = (batch.num_rows for batch in fragment.to_batches(columns=[]))
                rows = sum(counts) if self.options else int(fragment.count_rows())
            size = self._found.filesystem.size(fragment.path) or 0
            return _File(fragment, own, keys, [_Part(fragment, rows, size)])

    def _read_json(self, fragment: Any) -> tuple[Any, int]:
        """Return the columns of a whole file of JSON lines, and the number of its rows."""
        pa, rows, fields = require("pyarrow"), 0, []
        for text in self._texts(fragment):
            table = require("pyarrow.json").read_json(pa.BufferReader(text), **self.options)
            fields += [own if own.name in self._chosen else _without_times(own) for own in table.schema]
            rows += len(table)
        return pa.unify_schemas([pa.schema([own]) for own in fields], promote_options="permissive"), rows

    def _json_tables(self, fragment: Any, schema: Any) -> Iterator[Any]:
        """Yield these columns of a file of JSON lines.

        pyarrow's scanner looks for columns in the first megabyte only, and does not read a row without a line end.
        """
        pa, reader, parse = require("pyarrow"), require("pyarrow.json"), self.options.get("parse_options")
        keys = require("pyarrow.dataset").get_partition_keys(fragment.partition_expression)
        own = pa.schema([field for field in schema if field.name not in keys])
        options = reader.ParseOptions(own, parse and parse.newlines_in_values, "ignore")
        for text in self._texts(fragment):
            table = reader.read_json(pa.BufferReader(text), self.options.get("read_options"), options)
            for name in keys.keys() & {*schema.names}:
                table = table.append_column(name, pa.array([keys[name]] * len(table), schema.field(name).type))
            yield table.select(schema.names)

    def _texts(self, fragment: Any) -> Iterator[bytes]:
        """Yield the lines of a file, many at once; all if an object may have several lines, or if it is one list."""
        kept, options = b"", self.options.get("parse_options")
        size = None if self._kind == "json" and options and options.newlines_in_values else _TEXT_BYTES
        with self._dataset[0].filesystem.open_input_stream(fragment.path, compression="detect") as file:
            read = file.read(size).removeprefix(codecs.BOM_UTF8).lstrip()
            if self._kind == "json" and read[:1] == b"[":
                read = "".join(f"{json.dumps(row)}\n" for row in json.loads(read + file.read())).encode()
            while read:
                text, end, kept = (kept + read).rpartition(b"\n") if size else (read, b"", b"")
                if text.strip():
                    yield text + end
                read = file.read(size)
        if kept.strip():
            yield kept

    @cached_property
    def _parts(self) -> list[_Part]:
        return [part for file in self._files for part in file.parts]

    @cached_property
    def _schema(self) -> Any:
        """The columns that are read, of all files. One that a file lacks has no values there, and a line says so.

        Raises DataError if a column has types that have no type for the values of both.
        """
        pa, keys, found = require("pyarrow"), self._dataset[1], require("pyarrow").schema([])
        promote = "default" if self._kind == "parquet" else "permissive"
        for file in self._files:
            own = pa.schema([field for field in file.schema if not self.columns or field.name in self.columns])
            if twice := file.keys.keys() & {*own.names}:
                raise DataError(
                    f"column {min(twice)!r} is in {file.fragment.path}, and comes from the name of its directory, too; "
                    "rename one of them"
                )
            try:
                found = pa.unify_schemas([found, own], promote_options=promote)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{file.fragment.path} has other columns than the files before it: {error}; convert the files to "
                    "the same columns, or leave the column out with columns="
                ) from error
        fields = {field.name: field for field in [*found, *keys]}
        for name in self.columns or fields:
            if name not in fields:
                raise DataError(f"there is no column {name!r} in {', '.join(self.paths)}; there are {self._names()}")
            gaps = [file.fragment.path for file in self._files if name not in {*file.schema.names, *file.keys}]
            if gaps and os.environ.get("RANK", "0") == "0":
                others = f" and {count(len(gaps) - 3, 'other')}" if len(gaps) > 3 else ""
                say(f"column {name!r} is missing in {', '.join(gaps[:3])}{others}; rows from there have no value")
        found = pa.schema([fields[name] for name in self.columns or fields])
        if promote == "permissive":
            self._check_digits(found)
        return found

    def _names(self) -> list[str]:
        """Return the names of all columns."""
        return list(dict.fromkeys(name for file in self._files for name in [*file.schema.names, *file.keys]))

    @cached_property
    def _chosen(self) -> set[str]:
        """The columns of text files whose types the user has chosen."""
        explicit = getattr(self.options.get("parse_options"), "explicit_schema", None)
        types = getattr(self.options.get("convert_options"), "column_types", ())
        return {*(explicit.names if explicit else ()), *types}

    def _check_digits(self, schema: Any) -> None:
        """Raise DataError for a text file with an integer that would lose digits because its column has floats."""
        floats = [field for field in schema if "double" in str(field.type) and field.name not in self._chosen]
        for file in self._files if floats else ():
            read = require("pyarrow").schema([field for field in floats if field.name in file.schema.names])
            tables = self._tables(file.fragment, read, _SCAN_ROWS)
            large = {value: name for table in tables for name in read.names for value in _large(table[name])}
            for text in self._texts(file.fragment) if large else ():
                for number in map(int, _INTEGER.findall(text)):
                    if (name := large.get(float(number))) and number != float(number):
                        raise DataError(
                            f"column {name!r} has floats and the integer {number} in {file.fragment.path}, which would "
                            "lose digits; choose the type of the column, such as pa.uint64(), pa.decimal128(38) or "
                            "pa.float64(), with ParseOptions(explicit_schema=...) for JSON, and "
                            "ConvertOptions(column_types=...) for CSV"
                        )

    @cached_property
    def block_rows(self) -> Indices:
        return np.array([part.rows for part in self._parts], dtype=np.int64)

    @cached_property
    def row_bytes(self) -> float:
        """The size of a row in files, or that of the first rows in memory, which may be much larger."""
        first = next((part for part in self._parts if part.rows), None)
        if first is None:
            return 0
        sample = next(self._tables(first.fragment, self._schema, _SAMPLED_ROWS)).slice(0, _SAMPLED_ROWS)
        # The order of the rows depends on this size. So it must not change with each version of pyarrow.
        in_memory = 2.0 ** math.ceil(math.log2(max(1, sample.nbytes / sample.num_rows)))
        return max(in_memory, sum(part.size for part in self._parts) / self.rows)

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, block: int) -> Iterator[Block]:
        size = int(min(_SCAN_ROWS, max(1, _SCAN_BYTES / max(1.0, self.row_bytes))))
        fragment, left, _ = self._parts[block]
        for rows in rows_after(self._tables(fragment, self._schema, size), 0, left):
            left -= rows.num_rows
            yield rows
        if left:
            raise DataError(f"{_name(fragment)} has {left} fewer rows than when it was opened: it has changed")

    def _tables(self, fragment: Any, schema: Any, size: int) -> Iterator[Any]:
        """Yield these columns of a file or row group. ``size``: the most rows of a table, unless it is of JSON."""
        with _naming(_name(fragment)):
            if self._kind == "json":
                yield from self._json_tables(fragment, schema)
                return
            for batch in fragment.to_batches(schema=schema, batch_size=size, batch_readahead=4):
                yield require("pyarrow").Table.from_batches([batch])

    # -- facts ----------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        names = [PurePosixPath(file).name for file in self._found.files]
        sizes = {"rows": self.rows, "files": len(names), "bytes": float(sum(part.size for part in self._parts))}
        return {**sizes, "names": names, "blocks": self.block_rows.tolist()}

    def schema(self) -> Schema:
        return Schema(self._schema.names, self._schema.types)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn pyarrow's errors into a DataError with the name of what was read."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"cannot read {name}: {error}") from error


def _name(fragment: Any) -> str:
    groups = getattr(fragment, "row_groups", [])
    return f"{fragment.path}, row group {groups[0].id}" if len(groups) == 1 else str(fragment.path)


# -- finding files ---------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Files, sorted, and the directory below which their names say something."""

    filesystem: Any
    files: list[str]
    root: str


def found_files(paths: Sequence[str], endings: tuple[str, ...], kinds: str) -> Found:
    """Return the files of paths, directories and patterns; those that nobody named only with one of these endings.

    Names that begin with a dot or an underscore don't count, as in Spark's folders, unless a pattern has such names.
    ``_column=value`` is a column. kinds: says which files are wanted. Raises DataError if there are none.
    """
    try:
        systems = [find_filesystem(given) for given in paths]
    except ValueError as error:
        raise DataError(f"cannot read {', '.join(paths)}: {error}") from error
    filesystem, found, roots = systems[0][0], list[str](), list[str]()
    is_local = isinstance(filesystem, LocalFileSystem)
    for given, (other, path) in zip(paths, systems, strict=True):
        if other != filesystem:
            raise DataError(f"{paths[0]} and {given} are on different filesystems; read each by itself")
        is_name = filesystem.exists(path)
        names = {path: filesystem.info(path)} if is_name else filesystem.glob(path, detail=True)
        linked = {name for name in names if is_local and os.path.isdir(name)}
        folders = linked | {name for name, facts in names.items() if facts["type"] == "directory"}
        files = sorted({*names} - folders | {file for name in folders for file in filesystem.find(name)})
        if not is_name and not files:
            raise DataError(f"there is no file or directory {given}")
        fixed = path if is_name else _PATTERN.split(path)[0]
        root = fixed if filesystem.isdir(fixed) else os.path.dirname(fixed)
        visible = files if _is_hidden(path, root) else [file for file in files if not _is_hidden(file, root)]
        if is_local and (links := [*filter(os.path.isdir, visible)]):
            raise DataError(f"{links[0]} is a link to a directory: name it, too, in the list of paths")
        chosen = [file for file in visible if file == path or file.lower().endswith(endings)]
        if not chosen:
            raise DataError(f"{given} has no {kinds} files, but {count(len(visible), 'other')}")
        found += chosen
        roots.append(root)
    return Found(filesystem, found, os.path.commonpath(roots))


def _is_hidden(path: str, root: str) -> bool:
    parts = os.path.relpath(path, root).split("/")
    return any(part[:1] in (".", "_") and part != "." and not (part[0] == "_" and "=" in part) for part in parts)


def _keys_of(folders: list[str]) -> Any:
    """Return the columns that come from ``key=value`` in names of directories: integers, or text."""
    pa, values = require("pyarrow"), defaultdict[str, list[str]](list)
    for name, is_key, value in (part.partition("=") for folder in folders for part in folder.split("/")):
        if is_key:
            values[name] += [] if value == _NO_VALUE else [value]
    is_number = {name: all(re.fullmatch(r"-?\d{1,18}", value) for value in found) for name, found in values.items()}
    return pa.schema([(name, pa.int64() if is_number[name] else pa.string()) for name in values])


def _format_of(path: str) -> str | None:
    return next((kind for ending, kind in _ENDINGS.items() if path.lower().endswith(ending)), None)


# -- values of text files --------------------------------------------------------------------------------------------


def _without_times(field: Any) -> Any:
    """Return a field that pyarrow has found in JSON, with text for texts that look like times."""
    pa, kind = require("pyarrow"), field.type
    if pa.types.is_list(kind):
        return field.with_type(pa.list_(_without_times(kind.value_field)))
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_without_times(inner) for inner in kind]))
    return field.with_type(pa.string()) if pa.types.is_timestamp(kind) else field


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

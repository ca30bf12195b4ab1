"""Files of Parquet, CSV and JSON lines, read by pyarrow's scanner. Runs in: worker.

The row groups of Parquet files are blocks. CSV and JSON files are blocks, whose rows are counted by reading them once.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import re
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
_BLOCKS_AT_ONCE = 64
"""Row groups that one scanner reads, one after the other."""
_FOOTERS_AT_ONCE = 16
_LOOK_BYTES = 64


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
        paths = [_located(given)[1] for given in self.paths]
        fixed = [re.split(r"[*?\[]", path)[0] if not filesystem.exists(path) else path for path in paths]
        return os.path.commonpath([path if filesystem.isdir(path) else os.path.dirname(path) for path in fixed])

    @cached_property
    def _opened(self) -> list[tuple[Any, Any, list[tuple[Any, int, int]]]]:
        """Each file, its columns, and its blocks with the number of rows and bytes of each."""
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as threads:
            return list(threads.map(self._open, self._dataset.get_fragments()))

    def _open(self, fragment: Any) -> tuple[Any, Any, list[tuple[Any, int, int]]]:
        try:
            own = fragment.physical_schema
            if not hasattr(fragment, "row_groups"):
                # pyarrow is quick to count rows, but ignores some of its options.
                counts = (batch.num_rows for batch in fragment.to_batches(columns=[]))
                rows = sum(counts) if self.options else int(fragment.count_rows())
                return fragment, own, [(fragment, rows, self._files[0].size(fragment.path) or 0)]
            groups = [(group.id, group.num_rows, group.total_byte_size) for group in fragment.row_groups]
            return fragment, own, [(fragment.subset(row_group_ids=[number]), *sizes) for number, *sizes in groups]
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {fragment.path}: {error}") from error

    @cached_property
    def _blocks(self) -> tuple[list[Any], Indices, float]:
        """The blocks, the number of rows of each, and the bytes of all of them."""
        parts = [part for *_, found in self._opened for part in found]
        rows = np.array([count for _, count, _ in parts], dtype=np.int64)
        return [fragment for fragment, _, _ in parts], rows, float(sum(size for _, _, size in parts))

    @cached_property
    def _schema(self) -> Any:
        """The columns that are read, of all files. One that a file lacks has no values there, and a line says so.

        The types of text files are those of the first one that has the column, which pyarrow enforces. Raises DataError
        if those of other files differ.
        """
        whole, holders = self._dataset, defaultdict[str, list[str]](list)
        kind, fields = whole.format.default_extname, {field.name: field for field in whole.schema}
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
                if kind == "parquet" and own.type != known.type:
                    raise DataError(
                        f"column {name!r} is {known.type} in {holders[name][0]}, but {own.type} in {path}; convert the "
                        "files to the same columns, or leave the column out with columns="
                    )
                holders[name].append(path)
        if kind == "json":
            fields = {name: field.with_type(_without_times(field.type)) for name, field in fields.items()}
        explicit = getattr(self.options.get("parse_options"), "explicit_schema", None)
        fields |= {field.name: field for field in explicit or ()}
        for name in self.columns or fields:
            if name not in fields:
                raise DataError(f"there is no column {name!r} in {', '.join(self.paths)}; there are {[*fields]}")
            if os.environ.get("RANK", "0") == "0" and (gaps := {*self._files[1]} - {*holders[name]}):
                say(f"column {name!r} has no values in {_some(sorted(gaps))}, which lack it")
        return require("pyarrow").schema([fields[name] for name in self.columns or fields], whole.schema.metadata)

    @property
    def block_rows(self) -> Indices:
        return self._blocks[1]

    @cached_property
    def row_bytes(self) -> float:
        """The size of a row in files, or that of the first rows in memory, which may be much larger."""
        first = next((block for block, rows in enumerate(self.block_rows) if rows), None)
        if first is None:
            return 0
        try:
            sample = self._dataset_of([first]).head(_SAMPLED_ROWS)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"cannot read {self._names([first])}: {error}") from error
        # The order of the rows depends on this size. So it must not change with each version of pyarrow.
        in_memory = 2.0 ** math.ceil(math.log2(max(1, sample.nbytes / sample.num_rows)))
        return max(in_memory, self._blocks[2] / self.rows)

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, blocks: Sequence[int], skip: int, count: int) -> Iterator[Block]:
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            at_once = blocks[start : start + _BLOCKS_AT_ONCE]
            taken = min(count, int(self.block_rows[at_once].sum()) - skip)
            yield from self._scan(at_once, skip, taken)
            count, skip = count - taken, 0
            if not count:
                return

    def _scan(self, blocks: Sequence[int], skip: int, count: int) -> Iterator[Block]:
        table_of = require("pyarrow").Table.from_batches
        size = int(min(_SCAN_ROWS, max(1, _SCAN_BYTES / max(1.0, self.row_bytes))))
        try:
            found = self._dataset_of(blocks).to_batches(batch_size=size, batch_readahead=4, fragment_readahead=1)
            tables = (table_of([batch]) for batch in found)
            for rows in rows_after(tables, skip, count):
                yield rows
                count -= rows.num_rows
        except (OSError, ValueError, TypeError) as error:
            for block in blocks if len(blocks) > 1 else ():  # the one that cannot be read raises an error of its own
                deque(self._scan([block], 0, int(self.block_rows[block])), maxlen=0)
            raise DataError(f"cannot read {self._names(blocks)}: {error}") from error
        if count:
            raise DataError(f"{self._names(blocks)} has {count} fewer rows than when it was opened: it has changed")

    def _dataset_of(self, blocks: Sequence[int]) -> Any:
        whole, fragments = self._dataset, [self._blocks[0][block] for block in blocks]
        return require("pyarrow.dataset").FileSystemDataset(fragments, self._schema, whole.format, whole.filesystem)

    def _names(self, blocks: Sequence[int]) -> str:
        fragment = self._blocks[0][blocks[0]]
        groups = getattr(fragment, "row_groups", None)
        name = f"{fragment.path}, row group {groups[0].id}" if groups else fragment.path
        return str(name) if len(blocks) == 1 else f"one of {len(blocks)} blocks from {name} on"

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
        visible = [file for file in sorted(files) if file == path or _is_visible(file, path)]
        chosen = [file for file in visible if file == path or is_wanted(file)]
        if not chosen:
            raise DataError(f"{given} has no {kinds} files, but {count(len(visible), 'other')}")
        found += chosen
    return filesystem, found


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
    if not _is_pattern(path):
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


def _is_pattern(path: str) -> bool:
    return any(character in path for character in "*?[")


def _is_visible(file: str, folder: str) -> bool:
    """Return whether no part of the path below ``folder`` begins with a dot or an underscore, as in Spark's folders.

    ``_column=value`` is a column.
    """
    below = os.path.basename(file) if _is_pattern(folder) else os.path.relpath(file, folder)
    return not any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in below.split("/"))


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

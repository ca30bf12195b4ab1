"""``Dataset.write_parquet(path, mode=...)`` and the like: one file in a directory. Runs in: anywhere."""

from __future__ import annotations

import json
import math
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import fsspec
from fsspec.core import url_to_fs

from distrain.as_ray.data.arguments import SCHEDULING
from distrain.data.blocks import to_columns, to_table
from distrain.errors import DataError
from distrain.system.imports import require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distrain.data.blocks import Block


class SaveMode(str, Enum):
    """The fate of the files that are in the directory already."""

    CREATE = "create"
    APPEND = "append"
    OVERWRITE = "overwrite"
    IGNORE = "ignore"
    ERROR = "error"
    UPSERT = "upsert"


def write_files(rows: Block, path: str, ending: str, mode: SaveMode | str, options: Mapping[str, Any]) -> None:
    """Write rows to a file in a directory, as the mode says.

    Raises DataError before it changes a file if the format cannot hold a column.
    """
    options = {name: value for name, value in options.items() if name not in SCHEDULING}
    write = _WRITERS[ending](to_table(rows), options)
    if _make_directory(path, mode):
        with fsspec.open(f"{str(path).rstrip('/')}/{uuid4().hex}_000000.{ending}", "wb") as file:
            write(file)


def _make_directory(path: str, mode: SaveMode | str) -> bool:
    """Make a directory for files, and return False if none shall be written. Raises ValueError as the mode says."""
    filesystem, place = url_to_fs(path)
    mode = SaveMode(mode)
    if filesystem.exists(place):
        if mode in (SaveMode.CREATE, SaveMode.ERROR):
            raise ValueError(f"{path} exists, and the mode is {mode}: give another path, or mode=SaveMode.OVERWRITE")
        if mode is SaveMode.IGNORE:
            return False
        if mode is SaveMode.OVERWRITE:
            filesystem.rm(place, recursive=True)
    if mode is SaveMode.UPSERT:
        raise ValueError("files have no keys by which rows could be replaced: read them, and write them anew")
    filesystem.makedirs(place, exist_ok=True)
    return True


# -- formats ---------------------------------------------------------------------------------------------------------


def _parquet(table: Any, options: Mapping[str, Any]) -> Callable[[Any], None]:
    pa, write = require("pyarrow"), require("pyarrow.parquet").write_table
    for place, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if "_view" in str(column.type) or ("dictionary" in str(column.type) and pa.types.is_nested(column.type)):
            # pyarrow's writer fails for some of these
            whole = to_table(to_columns(table.select([name])))
            table = table.set_column(place, name, whole.column(name))
        try:
            write(table.select([name]).slice(0, 0), pa.MockOutputStream())
        except NotImplementedError as error:
            raise _refused("Parquet", name, column, str(error)) from error
    return partial(write, table, **options)


def _csv(table: Any, options: Mapping[str, Any]) -> Callable[[Any], None]:
    pa = require("pyarrow")
    for name, column in zip(table.column_names, table.columns, strict=True):
        if "binary" in str(column.type):
            raise _refused("CSV", name, column, "CSV has no bytes")
        try:
            column.slice(0, 0).cast(pa.string())
        except NotImplementedError as error:
            raise _refused("CSV", name, column, str(error)) from error
    return partial(require("pyarrow.csv").write_csv, table, **options)


def _json(table: Any, options: Mapping[str, Any]) -> Callable[[Any], None]:
    others = {name for name, value in options.items() if _JSON_LINES.get(name) != value}
    if others:
        raise TypeError(f"write_json({min(others)}=...) is not offered: use to_pandas().to_json()")
    fields = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            fields.append([f"{json.dumps(name)}: {_as_json(value)}" for value in column.to_pylist()])
        except (TypeError, ValueError) as error:
            raise _refused("JSON", name, column, str(error)) from error
    lines = [f"{{{', '.join(row)}}}\n".encode() for row in zip(*fields, strict=True)]
    return lambda file: file.writelines(lines)


_JSON_LINES = {"lines": True, "orient": "records"}
"""Options of pandas that ask for what is written anyway."""
_WRITERS: dict[str, Callable[[Any, Mapping[str, Any]], Callable[[Any], None]]] = {
    "parquet": _parquet,
    "csv": _csv,
    "json": _json,
}
"""By ending: the functions that return what writes a table to an open file."""


def _refused(ending: str, name: str, column: Any, reason: str) -> DataError:
    return DataError(
        f"column {name!r} ({column.type}) cannot be written as {ending}: {reason}; leave it out with drop_columns(), "
        "or convert it with map_batches()"
    )


def _as_json(value: Any) -> str:
    is_gap = isinstance(value, float) and math.isnan(value)
    return json.dumps(None if is_gap else value, default=_as_text, allow_nan=False)


def _as_text(value: Any) -> str:
    """Return a date or a time as JSON has it. Raises TypeError for anything else."""
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    raise TypeError(f"JSON has no {type(value).__name__}")

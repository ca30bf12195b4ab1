"""``Dataset.write_parquet(path, mode=...)`` and ``write_csv()``: one file in a directory. Runs in: anywhere."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import fsspec

from distrain.as_ray.data.arguments import WITHOUT_EFFECT
from distrain.data.blocks import to_table
from distrain.errors import DataError
from distrain.system.imports import find_filesystem, require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distrain.data.blocks import Block


class SaveMode(str, Enum):
    """The fate of the files that are in the directory already."""

    APPEND = "append"
    OVERWRITE = "overwrite"
    IGNORE = "ignore"
    ERROR = "error"


_WRITERS = {"parquet": ("pyarrow.parquet", "write_table"), "csv": ("pyarrow.csv", "write_csv")}


def write_files(rows: Block, path: str, ending: str, mode: SaveMode | str, options: Mapping[str, Any]) -> None:
    """Write rows to a file in a directory, as the mode says. Raises DataError if the format cannot hold a column."""
    module, function = _WRITERS[ending]
    write = getattr(require(module), function)
    table, mode = to_table(rows), SaveMode(mode)
    options = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}
    buffer = require("pyarrow").BufferOutputStream()
    try:
        write(table, buffer, **options)
    except (NotImplementedError, ValueError) as error:
        raise DataError(
            f"the rows cannot be written as {ending}: {error}; leave columns out with drop_columns(), or convert them "
            "with map_batches()"
        ) from error
    filesystem, place = find_filesystem(path)
    if filesystem.exists(place):
        if mode is SaveMode.ERROR:
            raise ValueError(f"{path} exists, and the mode is {mode}: give another path, or mode=SaveMode.OVERWRITE")
        if mode is SaveMode.IGNORE:
            return
        if mode is SaveMode.OVERWRITE:
            filesystem.rm(place, recursive=True)
    filesystem.makedirs(place, exist_ok=True)
    with fsspec.open(f"{str(path).rstrip('/')}/{uuid4().hex}_000000.{ending}", "wb") as file:
        file.write(buffer.getvalue())

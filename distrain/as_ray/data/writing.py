"""``Dataset.write_parquet(path)`` and ``write_csv()``: one more file in a directory. Runs in: anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from distrain.as_ray.data.arguments import WITHOUT_EFFECT
from distrain.data.blocks import to_table
from distrain.errors import DataError
from distrain.system.imports import find_filesystem, require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distrain.data.blocks import Block


_WRITERS = {"parquet": ("pyarrow.parquet", "write_table"), "csv": ("pyarrow.csv", "write_csv")}


def write_files(rows: Block, path: str, ending: str, options: Mapping[str, Any]) -> None:
    """Write rows to a file in a directory, beside its others. Raises DataError if the format cannot hold a column."""
    if options.get("mode"):
        raise TypeError(f"write_{ending}(mode=...) is not supported: delete {path} before if it should be replaced")
    module, function = _WRITERS[ending]
    options = {name: value for name, value in options.items() if name not in {*WITHOUT_EFFECT, "mode"}}
    buffer = require("pyarrow").BufferOutputStream()
    try:
        getattr(require(module), function)(to_table(rows), buffer, **options)
    except (NotImplementedError, ValueError) as error:
        raise DataError(
            f"the rows cannot be written as {ending}: {error}; leave columns out with drop_columns(), or convert them "
            "with map_batches()"
        ) from error
    filesystem, place = find_filesystem(path)
    filesystem.makedirs(place, exist_ok=True)
    with filesystem.open(f"{place.rstrip('/')}/{uuid4().hex}_000000.{ending}", "wb") as file:
        file.write(buffer.getvalue())

"""The reports of a run as tables, in the formats of other programs. Runs in: anywhere."""

from __future__ import annotations

import csv
import re
from typing import IO, TYPE_CHECKING, Any

from distrain.storage.runs.details import reports_of
from distrain.system.imports import require
from distrain.system.text import flatten, without_controls

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.storage.runs.listing import Run

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\n")
_PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_COLUMNS = ("time", "attempt", "rank", "index", "step")


def rows_of(run: Run) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of the columns, and a row for every report of every rank. Raise OSError.

    Metrics are flattened with ``/``. A metric that is called like another column has ``metrics/`` in front of it.
    """
    rows = []
    names = dict.fromkeys(_COLUMNS)
    for report in reports_of(run, rank=None):
        metrics = {
            f"metrics/{name}" if name in _COLUMNS else name: item for name, item in flatten(report["metrics"]).items()
        }
        names |= dict.fromkeys(metrics)
        rows.append({**{name: report.get(name) for name in _COLUMNS}, **metrics})
    return list(names), rows


def write_csv(run: Run, file: IO[bytes]) -> None:
    """Write the reports as csv. A missing metric is empty; NaN and infinities are ``nan``, ``inf`` and ``-inf``.

    Spreadsheets would run a text that begins like a formula, so it gets a ``'`` in front. Control characters are left
    out.
    """
    import io

    names, rows = rows_of(run)
    text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_csv_cell, names))
    writer.writerows([_csv_cell(row.get(name, "")) for name in names] for row in rows)
    text.detach()


def _csv_cell(item: Any) -> Any:
    if item is None or isinstance(item, (int, float)):
        return item
    text = without_controls(str(item))
    return f"'{text}" if text.startswith(_FORMULA_STARTS) and not _PLAIN_NUMBER.fullmatch(text) else text


def write_parquet(run: Run, file: IO[bytes]) -> None:
    """Write the reports as Parquet, a column of several types as text. Raise ImportError without pyarrow."""
    pyarrow, parquet = require("pyarrow"), require("pyarrow.parquet")

    def column(items: list[Any]) -> Any:
        try:
            return pyarrow.array(items)
        except (pyarrow.ArrowException, OverflowError):  # of several types, or an int beyond 64 bits
            return pyarrow.array([None if item is None else str(item) for item in items])

    names, rows = rows_of(run)
    parquet.write_table(pyarrow.table({name: column([row.get(name) for row in rows]) for name in names}), file)


FORMATS: dict[str, Callable[[Run, IO[bytes]], None]] = {"csv": write_csv, "parquet": write_parquet}
"""The function that writes a run into a file, by the name of the format."""

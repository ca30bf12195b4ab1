"""The reports of a run as tables, in the formats of other programs. Runs in: anywhere."""

from __future__ import annotations

import csv
import math
import re
from typing import IO, TYPE_CHECKING, Any

from distrain.storage.runs.details import reports_of
from distrain.system.imports import require
from distrain.system.text import flatten, without_controls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """Write the reports as Parquet. Raise ImportError if pyarrow is not installed."""
    pyarrow, parquet = require("pyarrow"), require("pyarrow.parquet")
    names, rows = rows_of(run)
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    parquet.write_table(pyarrow.table(columns), file)


def _column(items: Sequence[Any]) -> list[Any]:
    """Return the values of a column in one type: as they are if they are numbers or all of one type, else as text."""
    kinds = {type(item) for item in items if item is not None}
    if kinds <= {int, float} and float in kinds:
        return [None if item is None else _as_float(item) for item in items]
    return list(items) if len(kinds) <= 1 and not kinds & {list} else [None if i is None else str(i) for i in items]


def _as_float(item: float) -> float:
    try:
        return float(item)
    except OverflowError:  # an int beyond the floats
        return math.inf if item > 0 else -math.inf


FORMATS: dict[str, Callable[[Run, IO[bytes]], None]] = {"csv": write_csv, "parquet": write_parquet}
"""The function that writes a run into a file, by the name of the format."""

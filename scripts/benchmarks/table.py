"""Figures of repeated runs as rows of one table, and as JSON."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLUMNS = "{measure:<30} {workers:>7}  {launcher:<28} {median:>10}  {spread:<22} {ratio:>10}  {runs:>5}  {remarks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One value of one run. variant: distinguishes several values of the same launcher and measure."""

    measure: str
    value: float
    unit: str
    variant: str = ""
    remark: str = ""


@dataclass(slots=True, kw_only=True)
class Row:
    """All runs of a launcher for a measure. values: by round, None for a failure. workers: 0 if it has none."""

    measure: str
    workers: int
    launcher: str
    unit: str
    values: list[float | None]
    remarks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def measured(self) -> list[float]:
        return [value for value in self.values if value is not None]

    def ratio_to(self, reference: Row | None) -> float | None:
        """Return the median of the ratios within the rounds."""
        if reference is None:
            return None
        pairs = zip(self.values, reference.values, strict=True)
        ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
        return statistics.median(ratios) if ratios else None


def header() -> str:
    names = {"measure": "measure", "workers": "workers", "launcher": "launcher", "median": "median"}
    line = COLUMNS.format(**names, spread="min to max", ratio="x distrain", runs="runs", remarks="remarks")
    return f"{line}\n{'-' * len(line)}"


def show_row(row: Row, reference: Row | None) -> str:
    """Return the row as a line of the table. reference: distrain's row of the same measure."""
    ratio = row.ratio_to(reference)
    values = row.measured
    remarks = sorted(set(row.remarks))
    if row.failures:
        remarks = [f"{len(row.failures)} failed: {row.failures[-1]}", *remarks]
    return COLUMNS.format(
        measure=row.measure,
        workers=row.workers or "",
        launcher=row.launcher,
        median=show(statistics.median(values), row.unit) if values else "failed",
        spread=f"{show(min(values), row.unit)} to {show(max(values), row.unit)}" if values else "",
        ratio=show_ratio(ratio),
        runs=show_runs(row.values),
        remarks="; ".join(remarks),
    ).rstrip()


def show(value: float, unit: str) -> str:
    """Return the value with its unit, with about three digits. Long times are in ms or s."""
    for smaller, larger in (("us", "ms"), ("ms", "s")):
        if unit == smaller and value >= 1000:
            value, unit = value / 1000, larger
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:,.{digits}f} {unit}"


def show_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"


def show_runs(values: Sequence[float | None]) -> str:
    """Return how many runs gave a value, and how many there were."""
    return f"{sum(value is not None for value in values)}/{len(values)}"


def as_json(rows: Sequence[tuple[Row, Row | None]], **also: Any) -> Mapping[str, Any]:
    return {
        **also,
        "rows": [
            {
                "measure": row.measure,
                "workers": row.workers,
                "launcher": row.launcher,
                "unit": row.unit,
                "median": statistics.median(row.measured) if row.measured else None,
                "min": min(row.measured, default=None),
                "max": max(row.measured, default=None),
                "ratio_to_distrain": row.ratio_to(reference),
                "values": row.values,
                "remarks": sorted(set(row.remarks)),
                "failures": row.failures,
            }
            for row, reference in rows
        ],
    }

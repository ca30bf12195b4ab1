"""The statements that docs/comparison.md, the README and the benchmark share. Needs no package and no network."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from comparison.claims import CELLS, HOST_CELLS, PHRASES, TITLES
from distrain.system import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    Table = dict[str, dict[str, str]]

COMPARISON, README, BENCHMARK = "docs/comparison.md", "README.md", "docs/internals/benchmark.md"
OURS = "distrain"
TIMES_ROW = "starts 8 workers in"
TIMES = {
    OURS: ("{} s, `distrain run` {} s", ["distrain fit(), import torch", "distrain.launch"]),
    "Ray Train": ("{} s", ["Ray Train"]),
    "torchrun": ("{} s", ["torchrun"]),
    "accelerate": ("{} s", ["accelerate launch"]),
    "torchrunx": ("{} s", ["torchrunx"]),
}
"""By column: what the cell says, and the launchers of the benchmark whose medians it has."""
GPUS_ROW = "tested on GPUs"
_NOTE = re.compile(r" \[\d+\]$")


def differences(root: Path) -> list[str]:
    """Return a line for everything that one document says and another doesn't, or that has no fact behind it."""
    comparison, readme, benchmark = ((root / name).read_text() for name in (COMPARISON, README, BENCHMARK))
    table, hosts = tables(comparison)
    [short] = tables(readme.replace("(docs/", "("))
    found = [*_unfounded(table, CELLS), *_unfounded(hosts, HOST_CELLS)]
    found += _differ(f"{COMPARISON}: {TIMES_ROW}", table[TIMES_ROW], times(benchmark))
    for row, cells in short.items():
        wanted = {column: _NOTE.sub("", cell) for column, cell in table.get(row, {}).items()}
        found += _differ(f"{README}: {row}", cells, wanted)
    found += _missing(COMPARISON, comparison, _versions(benchmark))
    found += _missing(f"{README}, Status", readme.partition("## Status")[2], [table[GPUS_ROW][OURS]])
    for claim in PHRASES:
        found += _missing(claim.place, (root / claim.place).read_text(), [claim.text])
    return found


def named_versions(comparison: str, packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that the comparison names, if it names one."""
    titles = {package: re.escape(TITLES.get(package, package)) for package in packages}
    found = {package: re.search(rf"{title} (\d[\d.]*\d)", comparison) for package, title in titles.items()}
    return {package: match[1] for package, match in found.items() if match}


def tables(text: str) -> list[Table]:
    """Return the tables of a page of Markdown whose first column has no title: row -> column -> cell."""
    found = []
    for block in re.findall(r"^\| \|.*\n\|[-|:]+\|\n(?:\|.*\n)+", text, re.MULTILINE):
        (_, *columns), _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append({row: dict(zip(columns, cells, strict=True)) for row, *cells in rows})
    return found


def times(benchmark: str) -> dict[str, str]:
    """Return what each column says about the start of eight workers."""
    medians = dict(re.findall(r"^\| start \| 8 \| (.+?) \| ([\d.]+) s \|", benchmark, re.MULTILINE))
    return {
        column: form.format(*(f"{float(medians[launcher]):.1f}" for launcher in launchers))
        for column, (form, launchers) in TIMES.items()
    }


def _versions(benchmark: str) -> list[str]:
    """Return what the comparison has to say about versions: those that were measured are those that it compares.

    torch may be a newer one, if the page says which one was measured.
    """
    [line] = re.findall(r"^Versions: (.*)", benchmark, re.MULTILINE)
    measured = dict(re.findall(r"(\w+) (\d[\d.]*\d)", line))
    named = [f"{TITLES.get(name, name)} {measured[name]}" for name in ("ray", "accelerate", "torchrunx")]
    return [f"distrain {__version__}", *named, f"on two CPUs with torch {measured['torch']}"]


def _unfounded(table: Table, claims: Mapping[str, Mapping[str, tuple[str, object]]]) -> list[str]:
    """Return the cells about others that have no fact, and the facts that have no cell."""
    cells = {(row, column): cell for row, cells in table.items() for column, cell in cells.items()}
    cells = {place: cell for place, cell in cells.items() if OURS not in place and place[0] != TIMES_ROW}
    known = {(row, column): text for row, of_row in claims.items() for column, (text, _) in of_row.items()}
    return [
        f"{COMPARISON}: {' / '.join(place)}: says {cells.get(place)!r}, but claims.py {known.get(place)!r}"
        for place in {**cells, **known}
        if cells.get(place) != known.get(place)
    ]


def _differ(place: str, cells: dict[str, str], wanted: dict[str, str]) -> list[str]:
    return [
        f"{place} / {column}: says {cells.get(column)!r} instead of {wanted.get(column)!r}"
        for column in {**cells, **wanted}
        if cells.get(column) != wanted.get(column)
    ]


def _missing(place: str, text: str, phrases: list[str]) -> list[str]:
    """Return the phrases that a text lacks. Line breaks don't count."""
    words = " ".join(text.split())
    return [f"{place}: {phrase!r} is missing" for phrase in phrases if phrase not in words]

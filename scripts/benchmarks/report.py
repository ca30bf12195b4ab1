"""The results for the docs: one Markdown table, one picture, and a comparison with an earlier run.

All functions take the dictionary that :func:`benchmarks.table.as_json` makes, so that old results can be shown, too.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from benchmarks.launchers import DISTRAIN
from benchmarks.table import show, show_ratio, show_runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    Results = Mapping[str, Any]
    JsonRow = Mapping[str, Any]

TABLE, PICTURE = "benchmark.md", "benchmark.svg"

WIDTH = 760
LABEL_WIDTH = 250
BAR_WIDTH = 300
BAR_HEIGHT, BAR_STEP, TITLE_STEP, GROUP_GAP = 14, 20, 24, 14
MARGIN = 16
COLOUR, COLOUR_OF_OTHERS = "#2563eb", "#94a3b8"
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1e293b }
.title { font-weight: 600 }
.value { font-variant-numeric: tabular-nums }
"""
MORE_IS_BETTER = ("/s",)


def write_for_docs(results: Results, folder: Path) -> None:
    """Write the table and the picture into the folder."""
    (folder / TABLE).write_text(_markdown(results))
    (folder / PICTURE).write_text(_picture(results))


def _groups(results: Results) -> Iterator[tuple[str, Sequence[JsonRow]]]:
    """Return the title and the rows of each measure that was made with several launchers."""
    for (measure, workers), group in groupby(results["rows"], key=lambda row: (row["measure"], row["workers"])):
        members = list(group)
        if len(members) > 1 and any(row["launcher"] == DISTRAIN and row["median"] for row in members):
            number = f", {workers} worker{'s' * (workers > 1)}" if workers else ""
            more = " (more is better)" if members[0]["unit"] in MORE_IS_BETTER else ""
            yield f"{measure}{number}{more}", members


# -- the table ------------------------------------------------------------------------------------------------------


def _markdown(results: Results) -> str:
    machine = results["machine"]
    gpus = f", {machine['gpus']} GPUs" if machine.get("gpus") else ""
    versions = {name: version for found in results["versions"].values() for name, version in found.items()}
    lines = [
        "# Benchmark",
        "",
        f"Made by `scripts/benchmark` on a machine with {machine['cpus']} CPUs{gpus}, in {results['rounds']} rounds.",
        "In each round, each launcher runs once, in turn. The ratio is the median of the ratios within the rounds.",
        "Only the ratios hold on other machines. `scripts/benchmark --help` explains the measures.",
        "Runs: how many of them gave a figure. The others failed.",
        "",
        f"Versions: {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}.",
        "",
        f"![The medians as bars]({PICTURE})",
        "",
        "| measure | workers | launcher | median | min to max | x distrain | runs |",
        "|---|--:|---|--:|--:|--:|--:|",
        *(_markdown_row(row) for row in results["rows"]),
    ]
    return "\n".join(lines) + "\n"


def _markdown_row(row: JsonRow) -> str:
    if row["median"] is None:
        figures = ("failed", "", "")
    else:
        spread = f"{show(row['min'], row['unit'])} to {show(row['max'], row['unit'])}"
        figures = (show(row["median"], row["unit"]), spread, show_ratio(row["ratio_to_distrain"]))
    cells = (row["measure"], row["workers"] or "", row["launcher"], *figures, show_runs(row["values"]))
    return f"| {' | '.join(map(str, cells))} |"


# -- the picture ----------------------------------------------------------------------------------------------------


def _picture(results: Results) -> str:
    """Return an SVG with one bar for each launcher. The bars of each measure have a scale of their own."""
    shapes: list[str] = []
    y = MARGIN
    for title, rows in _groups(results):
        shapes.append(f'<text class="title" x="{MARGIN}" y="{y + 12}">{escape(title)}</text>')
        y += TITLE_STEP
        longest = max(row["median"] or 0.0 for row in rows)
        for row in rows:
            shapes += _bar(row, y, BAR_WIDTH * (row["median"] or 0.0) / longest)
            y += BAR_STEP
        y += GROUP_GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def _bar(row: JsonRow, y: int, width: float) -> list[str]:
    left, middle = MARGIN + LABEL_WIDTH, y + BAR_HEIGHT - 3
    colour = COLOUR if row["launcher"].startswith("distrain") else COLOUR_OF_OTHERS
    value = "failed" if row["median"] is None else show(row["median"], row["unit"])
    if row["launcher"] != DISTRAIN and row["ratio_to_distrain"] is not None:
        value += f", {show_ratio(row['ratio_to_distrain'])} x distrain"
    return [
        f'<text x="{left - 10}" y="{middle}" text-anchor="end">{escape(row["launcher"])}</text>',
        f'<rect x="{left}" y="{y}" width="{max(width, 1):.1f}" height="{BAR_HEIGHT}" rx="2" fill="{colour}"/>',
        f'<text class="value" x="{left + width + 8:.1f}" y="{middle}">{escape(value)}</text>',
    ]


# -- an earlier run -------------------------------------------------------------------------------------------------


def compare(results: Results, earlier: Results) -> list[str]:
    """Return a line for each row that both runs have: the ratios to the earlier run.

    The time of a launcher changes with the machine and what else runs on it. Its ratio to distrain, within one run,
    changes much less. So each line has both.
    """
    before = {_key(row): row for row in earlier["rows"] if row["median"]}
    lines = []
    for row in results["rows"]:
        former = before.get(_key(row))
        if former is None or not row["median"]:
            continue
        line = f"{row['measure']:<25} {row['workers'] or '':>7}  {row['launcher']:<28} "
        line += f"{row['median'] / former['median']:>9.2f} x"
        if row["launcher"] != DISTRAIN and row["ratio_to_distrain"] and former["ratio_to_distrain"]:
            line += f"   {former['ratio_to_distrain']:.2f} -> {row['ratio_to_distrain']:.2f} x distrain"
        lines.append(line)
    return lines


def _key(row: JsonRow) -> tuple[str, int, str]:
    return row["measure"], row["workers"], row["launcher"]

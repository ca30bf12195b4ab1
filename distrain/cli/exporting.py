"""``distrain export``, ``plot`` and ``page``: runs for other programs, as pictures, and as a page.

Runs in: coordinator.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.api.tracker import TRACKERS, parse_tracker, tracker_class
from distrain.cli import parsers
from distrain.cli.text import echo, screen
from distrain.storage.retention import flatten
from distrain.storage.runs.details import reports_of
from distrain.storage.runs.export import FORMATS
from distrain.storage.runs.listing import Run, WrongArgument
from distrain.system.imports import require

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_COLOURS = ("cyan", "red", "green", "yellow", "magenta", "blue", "white")
_SCREEN = (80, 24)
_BESIDE_PLOT = (24, 8)
"""Columns and lines that the axes take."""


class _Suggestions(list[str]):
    """Choices that completion offers. Other values are allowed, too."""

    def __contains__(self, value: object) -> bool:
        return True


def export_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain export``."""
    parser = parsers.make_parser(
        "export",
        "Write every report of every rank: time, attempt, rank, index, step, and the metrics. parquet needs pyarrow.\n"
        "Or log the reports that a tracker has not had to it, with the options of --tracker.",
        "  distrain export last --to csv > reports.csv\n  distrain export last --to parquet -o reports.parquet\n"
        "  distrain export last --to wandb:project=mnist",
    )
    parsers.add_run(parser)
    add = parser.add_argument
    add(
        "--to",
        required=True,
        choices=_Suggestions([*sorted(FORMATS), *TRACKERS]),
        metavar="FORMAT",
        help=f"{', '.join(sorted(FORMATS))}, or a tracker: {', '.join(TRACKERS)}",
    )
    add("-o", "--output", metavar="FILE", help="the file to write (default: stdout); not for trackers")
    return parser


def run_export(options: argparse.Namespace) -> int:
    """Write the reports of a run, or log them to a tracker."""
    run = parsers.run_of(options)
    if options.to not in FORMATS:
        return _log_to_tracker(run, options.to, options.output)
    write = FORMATS[options.to]
    if options.output is None:
        if sys.stdout.isatty() and options.to != "csv":
            raise WrongArgument(f"{options.to} is not for a terminal: name a file with -o")
        write(run, sys.stdout.buffer)
        return 0
    target = Path(options.output)
    temporary = target.with_name(f"{target.name}.new")
    try:
        with temporary.open("wb") as file:
            write(run, file)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"wrote {target}")
    return 0


def _log_to_tracker(run: Run, tracker: str, output: str | None) -> int:
    from distrain.trackers import export

    try:
        if tracker_class(tracker.partition(":")[0]) is None:
            known = ", ".join([*sorted(FORMATS), *TRACKERS])
            raise WrongArgument(f"--to {tracker}: there is no such format or tracker; there are {known}")
        if output is not None:
            raise WrongArgument(f"-o {output}: a tracker has its own place; see the option directory of a tracker")
        url = export(run.path, parse_tracker(tracker, "--to"))
    except ValueError as error:
        raise WrongArgument(str(error)) from None
    echo(f"logged {run.name} to {tracker.partition(':')[0]}" + (f": {url}" if url else ""))
    return 0


# -- page ------------------------------------------------------------------------------------------------------------


def page_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain page``."""
    parser = parsers.make_parser(
        "page",
        "Write the page of a run: one HTML file that needs no network, with what became of the run, where the time "
        "went, attempts, failures, curves, slow ranks and checkpoints.",
        "  distrain page last\n  distrain page last --watch\n  distrain page s3://bucket/runs/train-1 -o train-1.html",
    )
    parsers.add_run(parser)
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", help="the file to write (default: page.html in the run directory)")
    add("--watch", action="store_true", help="write it again and again until the run has ended; browsers reload it")
    return parser


def run_page(options: argparse.Namespace) -> int:
    """Write the page of a run."""
    from distrain.page import watch_page, write_page

    run = parsers.run_of(options)
    if options.watch:
        target = options.output or run.location / "page.html"
        echo(f"writing {target} until the run has ended; Ctrl-C ends that")
    echo(f"wrote {(watch_page if options.watch else write_page)(run.location, options.output)}")
    return 0


# -- plot ------------------------------------------------------------------------------------------------------------


def plot_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain plot``."""
    parser = parsers.make_parser(
        "plot",
        "Draw metrics of rank 0 over the steps: in the terminal, or into a file (png, svg, pdf). It needs "
        "pip install 'distrain[plot]'.",
        "  distrain plot last -m loss\n  distrain plot train-2026-11-23 last -m loss -m eval/loss -o loss.png",
    )
    parsers.add_run(parser, nargs="+")
    add = parser.add_argument
    add("-m", "--metric", action="append", required=True, metavar="NAME", help="a metric, such as loss or eval/loss")
    add("-o", "--output", metavar="FILE", help="draw into this file")
    return parser


def run_plot(options: argparse.Namespace) -> int:
    """Draw metrics."""
    curves: dict[str, list[tuple[int, float]]] = {}
    runs = parsers.runs_of(options)
    for run in runs:
        reports = list(reports_of(run))
        for metric in options.metric:
            label = metric if len(runs) == 1 else f"{run.name} {metric}"
            curves[label] = _curve(run, reports, metric)
    if options.output is None:
        echo(_drawing(curves))
    else:
        _draw_into(options.output, curves)
        print(f"wrote {options.output}")
    return 0


def _curve(run: Run, reports: Sequence[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    """Return the values by step. Of a step that a restart has repeated, the later value counts."""
    values: dict[int, float] = {}
    known: set[str] = set()
    for report in reports:
        metrics = flatten(report["metrics"])
        known |= metrics.keys()
        item = metrics.get(metric)
        if isinstance(item, (int, float)) and not isinstance(item, bool) and abs(item) < float("inf"):
            values[report["step"]] = item
    if not values:
        raise WrongArgument(
            f"{run.name} has no numbers of {metric!r}; its metrics: {', '.join(sorted(known)) or 'none'}"
        )
    return sorted(values.items())


def _drawing(curves: dict[str, list[tuple[int, float]]]) -> str:
    plotille = require("plotille")
    columns, lines = screen() or _SCREEN
    figure = plotille.Figure()
    figure.width = max(columns - _BESIDE_PLOT[0], 20)
    figure.height = max(lines - _BESIDE_PLOT[1] - len(curves), 5)
    figure.color_mode = "names"
    figure.with_colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    steps = [step for points in curves.values() for step, _ in points]
    values = [item for points in curves.values() for _, item in points]
    figure.set_x_limits(min(steps), max(max(steps), min(steps) + 1))
    if min(values) < max(values):
        figure.set_y_limits(min(values), max(values))
    figure.x_label, figure.y_label = "step", "value"
    for kind in (int, float):
        figure.register_label_formatter(kind, _label)
    for index, (label, points) in enumerate(curves.items()):
        draw = figure.plot if len(points) > 1 else figure.scatter
        draw(*zip(*points, strict=True), label=label, lc=_COLOURS[index % len(_COLOURS)])
    text: str = figure.show(legend=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _label(item: float, chars: int, delta: float, left: bool = False) -> str:
    text = f"{item:.4g}"
    return text.ljust(chars) if left else text.rjust(chars)


def _draw_into(file: str, curves: dict[str, list[tuple[int, float]]]) -> None:
    require("matplotlib").use("Agg")
    pyplot = require("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for label, points in curves.items():
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, label=label, marker="." if len(points) == 1 else "")
    axes.set_xlabel("step")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    try:
        figure.savefig(file, dpi=150)
    except ValueError as error:  # a file name with an unknown ending
        raise WrongArgument(f"{file}: {error}") from None
    finally:
        pyplot.close(figure)

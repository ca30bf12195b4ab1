"""``distrain export`` and ``distrain page``: runs for other programs, and as a page. Runs in: coordinator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.api.tracker import parse_tracker
from distrain.cli import parsers
from distrain.cli.text import echo
from distrain.storage.runs.export import FORMATS
from distrain.storage.runs.listing import Run, WrongArgument

if TYPE_CHECKING:
    import argparse


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
    add("--to", required=True, metavar="FORMAT", help=f"{', '.join(sorted(FORMATS))}, or a tracker such as wandb")
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

    if output is not None:
        raise WrongArgument(f"-o {output}: a tracker has its own place; see the option directory of a tracker")
    try:
        url = export(run.path, parse_tracker(tracker, "--to"))
    except ValueError as error:
        raise WrongArgument(f"{error}; the formats are {', '.join(sorted(FORMATS))}") from None
    echo(f"logged {run.name} to {tracker.partition(':')[0]}" + (f": {url}" if url else ""))
    return 0


def page_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain page``."""
    parser = parsers.make_parser(
        "page",
        "Write the page of a run: one HTML file that needs no network, with what became of the run, failures, curves, "
        "ranks, attempts, checkpoints, the use of the time, logs and settings.",
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
        echo(f"writing {options.output or run.location / 'page.html'} until the run has ended; Ctrl-C ends that")
    echo(f"wrote {(watch_page if options.watch else write_page)(run.location, options.output)}")
    return 0

"""``distrain export`` and ``distrain page``: runs for trackers, and as a page. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.api.tracker import parse_tracker
from distrain.cli import parsers
from distrain.cli.text import echo
from distrain.storage.runs.listing import WrongArgument

if TYPE_CHECKING:
    import argparse


def export_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain export``."""
    parser = parsers.make_parser(
        "export",
        "Send a tracker the reports that it lacks, with the options of --tracker.",
        "  distrain export last --to tensorboard\n  distrain export last --to wandb:project=mnist",
    )
    parsers.add_run(parser)
    parser.add_argument("--to", required=True, metavar="TRACKER", help="the tracker, such as wandb:project=mnist")
    return parser


def run_export(options: argparse.Namespace) -> int:
    """Log the reports of a run to a tracker."""
    from distrain.trackers import export

    run = parsers.run_of(options)
    try:
        url = export(run.path, parse_tracker(options.to, "--to"))
    except ValueError as error:
        raise WrongArgument(str(error)) from None
    echo(f"logged {run.name} to {options.to.partition(':')[0]}" + (f": {url}" if url else ""))
    return 0


def page_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain page``."""
    parser = parsers.make_parser(
        "page",
        "Write the page of a run, one HTML file that needs no network: outcome, failures, curves, ranks, attempts, "
        "checkpoints, where the time went, logs and settings.",
        "  distrain page last\n  distrain page s3://bucket/runs/train-1 -o train-1.html",
    )
    parsers.add_run(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the file to write (default: page.html in the run directory)"
    )
    return parser


def run_page(options: argparse.Namespace) -> int:
    """Write the page of a run."""
    from distrain.page import write_page

    run = parsers.run_of(options)
    echo(f"wrote {write_page(run.location, options.output)}")
    return 0

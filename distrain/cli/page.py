"""``distrain page``: a run as a page. Runs in: coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.text import echo

if TYPE_CHECKING:
    import argparse


def page_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain page``."""
    parser = parsers.make_run_parser(
        "page",
        "Write the page of a run, one HTML file that needs no network: outcome, failures, curves, ranks, attempts, "
        "checkpoints, where the time went, logs and settings.",
        "  distrain page last\n  distrain page s3://bucket/runs/train-1 -o train-1.html",
    )
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

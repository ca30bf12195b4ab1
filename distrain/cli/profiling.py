"""``distrain profile``: where a rank of a running run spends its time. Runs in: coordinator."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from distrain.cli import parsers
from distrain.cli.requesting import request
from distrain.cli.text import echo
from distrain.coordinator.requests import PROFILE, STACKS
from distrain.storage.runs.listing import RUNNING, STARTING, NoSuchRun
from distrain.storage.runs.logs import current

_MOST_S = 600.0
_POLL_S = 0.3
_PATIENCE_S = 20.0
"""Seconds that a rank may take to write its profile."""


def profile_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain profile``."""
    parser = parsers.make_parser(
        "profile",
        "Show in which lines a rank of a running run spends its time. The stacks of its threads are sampled and, if it "
        "uses torch, its operations are traced. The rank trains on, somewhat slower meanwhile; Ctrl-C only ends the "
        "command. Run it on the machine of fit().",
        "  distrain profile last\n  distrain profile last -r 3 --seconds 30",
    )
    parsers.add_run(parser)
    parser.add_argument("-r", "--rank", type=parsers.number, default=0, metavar="N", help="the rank (default: 0)")
    parser.add_argument("--seconds", type=_seconds, default=10.0, metavar="S", help="how long (default: 10)")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text) if text.replace(".", "", 1).isdecimal() else 0.0
    if not 0.01 <= seconds <= _MOST_S:
        raise argparse.ArgumentTypeError(f"must be from 0.01 to {_MOST_S:g}, got {text!r}")
    return seconds


def run_profile(options: argparse.Namespace) -> int:
    """Profile a rank."""
    run = parsers.run_of(options)
    file = Path(request(run, PROFILE, f"{options.rank} {options.seconds:.3f}"))
    echo(f"profiling for {options.seconds:g} s; the run continues, also after Ctrl-C")
    deadline = time.monotonic() + options.seconds + _PATIENCE_S
    while not file.exists():
        if current(run).state not in (RUNNING, STARTING):
            raise NoSuchRun("the run has ended, and the profile with it")
        if time.monotonic() > deadline:
            raise NoSuchRun(
                f"rank {options.rank} has sent no profile: it does not train, or native code in it keeps Python from "
                f"running\n{request(run, STACKS)}"
            )
        time.sleep(_POLL_S)
    echo(file.read_text())
    return 0

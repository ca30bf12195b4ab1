"""``distrain profile``: where a rank of a running run spends its time. Runs in: coordinator."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.requesting import request
from distrain.cli.text import echo
from distrain.coordinator.requests import PROFILE, STACKS
from distrain.storage.runs.listing import RUNNING, STARTING, NoSuchRun
from distrain.storage.runs.logs import current

if TYPE_CHECKING:
    import argparse

_POLL_S = 0.3
_PATIENCE_S = 20.0
"""Seconds that a rank may take to write its profile."""


def profile_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain profile``."""
    parser = parsers.make_run_parser(
        "profile",
        "Show in which lines a rank of a running run spends its time. The stacks of its threads are sampled and, if it "
        "uses torch, its operations are traced. The rank trains on, somewhat slower meanwhile; Ctrl-C only ends the "
        "command. Run it on the machine of fit().",
        "  distrain profile last\n  distrain profile last -r 3 --seconds 30",
    )
    parser.add_argument("-r", "--rank", type=parsers.number, default=0, metavar="N", help="the rank (default: 0)")
    parser.add_argument("--seconds", type=parsers.number, default=10, metavar="S", help="how long (default: 10)")
    return parser


def run_profile(options: argparse.Namespace) -> int:
    """Profile a rank."""
    run = parsers.run_of(options)
    file = Path(request(run, PROFILE, f"{options.rank} {options.seconds}"))
    echo(f"profiling for {options.seconds} s; the run continues, also after Ctrl-C")
    deadline = time.monotonic() + options.seconds + _PATIENCE_S
    while time.monotonic() < deadline and current(run).state in (RUNNING, STARTING):
        if file.exists():
            echo(file.read_text())
            return 0
        time.sleep(_POLL_S)
    why = "it does not train, or native code in it keeps Python from running"
    raise NoSuchRun(f"rank {options.rank} has sent no profile: {why}\n{request(current(run), STACKS)}")

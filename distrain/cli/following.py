"""``distrain logs``, ``stacks``, ``profile`` and ``stop``: what a run does now. Runs in: coordinator."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.requesting import request
from distrain.cli.text import echo, paint, write_json
from distrain.coordinator.requests import PROFILE, STACKS, STOP
from distrain.storage.lines import read_file
from distrain.storage.runs.listing import FINISHED, STOPPED, NoSuchRun, Run, run_at
from distrain.storage.runs.logs import Follower, attempts_with_logs, log_files, log_folder, read_lines
from distrain.system.text import duration

if TYPE_CHECKING:
    import argparse

_POLL_S = 0.1
_PATIENCE_S = 20.0
"""Seconds that a rank may take to write its profile."""


# -- logs ------------------------------------------------------------------------------------------------------------


def add_logs_options(add: parsers.Add) -> None:
    """Add the options of ``distrain logs``."""
    from distrain.cli.run.config_options import parse_ranks

    add("-r", "--ranks", type=parse_ranks, metavar="0,2-5", help="only these ranks")
    add("-f", "--follow", action="store_true", help="show new lines until the run ends")
    add("--attempt", type=parsers.number, metavar="N", help="the attempt (default: the last one)")
    add("-n", type=parsers.number, metavar="LINES", help="only the last lines of each rank")


def run_logs(options: argparse.Namespace) -> int:
    """Show logs."""
    run = parsers.run_of(options, waits=options.follow)
    if options.follow:
        return _follow(run, options)
    attempts = attempts_with_logs(run)
    if not attempts:
        raise NoSuchRun(_no_logs(run))
    attempt = attempts[-1] if options.attempt is None else options.attempt
    if attempt not in attempts:
        raise NoSuchRun(f"there are no logs of attempt {attempt}, only of {', '.join(map(str, attempts))}")
    files = log_files(run, attempt, options.ranks)
    width = max((len(str(rank)) for rank in files), default=1)
    for rank, file in files.items():
        for line in read_lines(run, file, options.n):
            sys.stdout.write(f"{_prefix(rank, width)}{line}\n")
    return 0


def _follow(run: Run, options: argparse.Namespace) -> int:
    if not isinstance(run.location, Path):
        raise NoSuchRun("-f follows local runs only; a remote run has its logs when it has ended")
    shown = options.attempt
    for attempt, rank, line in Follower(run, options.ranks, options.attempt, options.n).lines():
        if shown is not None and attempt != shown:
            print(paint(f"-- attempt {attempt} --", "2"), flush=True)
        shown = attempt
        width = len(str(max(run.ranks - 1, rank)))
        print(f"{_prefix(rank, width)}{line}", flush=True)
    run = run_at(run.location)
    if not attempts_with_logs(run):
        raise NoSuchRun(_no_logs(run))
    echo(f"distrain: {run.name} has ended: {run.state}", sys.stderr)
    return 0


def _prefix(rank: int, width: int) -> str:
    return f"[rank {rank:>{width}}] "


def _no_logs(run: Run) -> str:
    return (
        f"there are no logs in {log_folder(run)}: no worker has started yet, or train_func ran in the process of fit() "
        "(num_workers=0, or another launcher), whose output went to the terminal that started it"
    )


# -- requests --------------------------------------------------------------------------------------------------------


def run_stacks(options: argparse.Namespace) -> int:
    """Show stacks."""
    run = parsers.run_of(options)
    if options.json:
        write_json("stacks", name=run.name, **json.loads(request(run, STACKS, body=b"json")))
    else:
        echo(request(run, STACKS))
    return 0


def add_profile_options(add: parsers.Add) -> None:
    """Add the options of ``distrain profile``."""
    add("-r", "--rank", type=parsers.number, default=0, metavar="N", help="the rank (default: 0)")
    add("--seconds", type=parsers.number, default=10, metavar="S", help="how long (default: 10)")


def run_profile(options: argparse.Namespace) -> int:
    """Profile a rank."""
    run = parsers.run_of(options)
    file = Path(request(run, PROFILE, rank=options.rank, seconds=options.seconds))
    echo(f"profiling for {options.seconds} s; the run continues, also after Ctrl-C")
    deadline = time.monotonic() + options.seconds + _PATIENCE_S
    while time.monotonic() < deadline and run_at(run.location).is_active:
        with suppress(FileNotFoundError):
            echo(read_file(file, file.parents[3]).decode(errors="replace"))
            return 0
        time.sleep(_POLL_S)
    why = "it does not train, or native code in it keeps Python from running"
    raise NoSuchRun(f"rank {options.rank} has sent no profile: {why}\n{request(run_at(run.location), STACKS)}")


def run_stop(options: argparse.Namespace) -> int:
    """Stop a run. Return 0 if it was stopped or has finished, 1 if it has failed."""
    run = parsers.run_of(options)
    began = time.monotonic()
    log = sys.stderr if options.json else sys.stdout
    echo(f"{run.name}: {request(run, STOP)}; waiting for its end", log)
    try:
        while run_at(run.location).is_active:
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        print("\nthe run is still stopping; `distrain ls` shows when it has ended", file=log)
        return 130
    run = run_at(run.location)
    how = f"the run has {run.state}" if run.state == FINISHED else run.state
    print(f"{how} after {duration(time.monotonic() - began)}{_where_it_stands(run)}", file=log)
    if options.json:
        from distrain.cli.showing import details_of

        write_json("stop", **details_of(run))
    return 0 if run.state in (FINISHED, STOPPED) else 1


def _where_it_stands(run: Run) -> str:
    from distrain.storage.runs.details import checkpoints_of

    saved = checkpoints_of(run.location)
    if not saved:
        return "; it has no checkpoint"
    return f"; the latest checkpoint is {saved[-1].path.name}, at {saved[-1].place}"

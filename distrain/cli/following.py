"""``distrain logs``, ``attach``, ``stacks`` and ``stop``: what a run does now. Runs in: coordinator."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.text import paint
from distrain.console.text import duration
from distrain.runs.listing import (
    ABORTED,
    FAILED,
    FINISHED,
    FOREIGN,
    KILLED,
    RUNNING,
    STARTING,
    NoSuchRun,
    Run,
    local_run,
)
from distrain.runs.logs import Follower, attempts_with_logs, current, log_files, log_folder, read_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from distrain.console.run_status import RunStatus

_POLL_S = 0.1
_KILLED_EXIT = 137
"""The exit code that a shell shows after SIGKILL, by which most runs end whose end nobody has noted."""
_NOTICE_S = 5.0
"""Seconds between two lines that say that a run still has not ended."""


# -- logs ------------------------------------------------------------------------------------------------------------


def logs_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain logs``."""
    parser = parsers.make_parser(
        "logs",
        "Show what the ranks have printed: in their last attempt, rank after rank. With -f, show new lines as they "
        "come, also those of later attempts, until the run ends.",
        "  distrain logs last\n  distrain logs train-2026-11-24 -r 0,3 -n 20\n  distrain logs last -f",
    )
    parsers.add_run(parser)
    add = parser.add_argument
    add("-r", "--ranks", metavar="0,2-5", help="only these ranks")
    add("-f", "--follow", action="store_true", help="show new lines until the run ends")
    add("--attempt", type=parsers.number, metavar="N", help="the attempt (default: the last one)")
    add("-n", type=parsers.number, metavar="LINES", help="only the last lines of each rank")
    return parser


def run_logs(options: argparse.Namespace) -> int:
    """Show logs."""
    from distrain.cli.options import shown_ranks

    run = parsers.run_of(options)
    try:
        ranks = shown_ranks(options.ranks)
    except ValueError as error:
        raise NoSuchRun(str(error).replace("--ranks-shown", "-r")) from None
    if options.follow:
        return _follow(run, ranks, options)
    attempts = attempts_with_logs(run)
    if not attempts:
        raise NoSuchRun(_no_logs(run))
    attempt = attempts[-1] if options.attempt is None else options.attempt
    if attempt not in attempts:
        raise NoSuchRun(f"there are no logs of attempt {attempt}, only of {', '.join(map(str, attempts))}")
    files = log_files(run, attempt, ranks)
    width = max((len(str(rank)) for rank in files), default=1)
    for rank, file in files.items():
        for line in read_lines(file, options.n):
            sys.stdout.write(f"{_prefix(rank, width)}{line}\n")
    return 0


def _follow(run: Run, ranks: list[int] | None, options: argparse.Namespace) -> int:
    if not isinstance(run.location, Path):
        raise NoSuchRun("-f follows local runs only; a remote run has its logs when it has ended")
    shown = None if options.attempt is None else options.attempt
    for attempt, rank, line in Follower(run, ranks, options.attempt, options.n).lines():
        if shown is not None and attempt != shown:
            print(paint(f"-- attempt {attempt} --", "2"), flush=True)
        shown = attempt
        width = len(str(max(run.ranks - 1, rank)))
        print(f"{_prefix(rank, width)}{line}", flush=True)
    run = current(run)
    if not attempts_with_logs(run):
        raise NoSuchRun(_no_logs(run))
    print(f"distrain: {run.name} has ended: {run.state}", file=sys.stderr)
    return 0


def _prefix(rank: int, width: int) -> str:
    return f"[rank {rank:>{width}}] "


def _no_logs(run: Run) -> str:
    return (
        f"there are no logs in {log_folder(run)}: no worker has started yet, or train_func ran in the process of fit() "
        "(num_workers=0, or another launcher), whose output is where you have started it"
    )


# -- attach ----------------------------------------------------------------------------------------------------------


def attach_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain attach``."""
    parser = parsers.make_parser(
        "attach",
        "Return to a run of this machine: show its output and progress until its end, as in the terminal that started "
        "it. Ctrl-C leaves the run alone. The exit code is that of `distrain run`.",
        "  distrain run --detach --name big train.py\n  distrain attach big",
    )
    parsers.add_run(parser)
    parser.add_argument(
        "-n", type=parsers.number, default=20, metavar="LINES", help="the lines to begin with (default: 20)"
    )
    return parser


def run_attach(options: argparse.Namespace) -> int:
    """Show a run until it ends. Return the exit code of the run, 130 after Ctrl-C."""
    from distrain.console.run_status import RunStatus

    run = parsers.run_of(options)
    is_at_work = run.state in (RUNNING, STARTING)
    if not is_at_work:
        print(f"distrain: {run.name} has ended already", file=sys.stderr)
    advice = f"`distrain stop {parsers.named_again(options, run)}` stops it"
    has_lines = is_at_work or isinstance(run.location, Path)
    try:
        if has_lines:
            status = RunStatus(run.path, started=time.monotonic(), advice=f"Ctrl-C leaves the run alone; {advice}")
            _show_live(_begun_here(run) if is_at_work else run, status, options.n)
    except KeyboardInterrupt:
        print(f"\ndistrain: the run goes on; {advice}", file=sys.stderr)
        return 130
    return _show_end(current(run), has_lines=has_lines)


def _begun_here(run: Run) -> Run:
    """Return the run at work in its local directory, once it has begun. Raise NoSuchRun if it is at work elsewhere."""
    from distrain.storage.remote_store import local_directory_of

    if _host(run) not in (None, platform.node()):
        raise NoSuchRun(_unreachable(run))
    local = local_run(str(local_directory_of(run.path)))
    while local.state == STARTING:
        time.sleep(_POLL_S)
        local = current(local)
    if local.state == FOREIGN:  # it has its files on the machine of fit()
        raise NoSuchRun(_unreachable(run))
    return local


def _show_live(run: Run, status: RunStatus, last: int) -> None:
    """Show a run in a local directory until it has ended."""
    from distrain.console.attached import AttachedConsole
    from distrain.console.run_console import open_console
    from distrain.system.consoles import console_threads

    with console_threads(), open_console("auto" if run.state == RUNNING else "off", status) as console:
        AttachedConsole(run, console, last).show()


def _show_end(run: Run, *, has_lines: bool) -> int:
    """Show how a run has ended, and return the exit code of `distrain run`. ``has_lines``: its last lines are shown."""
    from distrain import errors
    from distrain.cli.showing import verdict
    from distrain.cli.text import show_error
    from distrain.console.attached import is_detached
    from distrain.runs.details import error_with_type, reports_of

    if run.state == KILLED or not (has_lines and is_detached(run)):  # else its last lines say it
        print(f"distrain: {run.name}: {verdict(run, list(reports_of(run)))}", file=sys.stderr)
    kind, text = error_with_type(run)
    if text and run.state in (FAILED, ABORTED):
        show_error(getattr(errors, kind, errors.DistrainError), text)
    code = run.manifest.get("exit_code")
    if run.state == KILLED:
        return _KILLED_EXIT
    return code if isinstance(code, int) else int(run.state != FINISHED)


# -- requests --------------------------------------------------------------------------------------------------------


def stacks_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain stacks``."""
    parser = parsers.make_parser(
        "stacks",
        "Show where all ranks of a running run are, those at the same place in one line. It does not disturb them. Run "
        "it on the machine of fit().",
        "  distrain stacks last",
    )
    parsers.add_run(parser)
    return parser


def run_stacks(options: argparse.Namespace) -> int:
    """Show stacks."""
    from distrain.coordinator.requests import STACKS

    print(_ask(parsers.run_of(options), STACKS))
    return 0


def stop_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain stop``."""
    parser = parsers.make_parser(
        "stop",
        "Ask a running run to stop as SIGTERM does, so that ranks that call should_stop() store a checkpoint; and wait "
        "for its end. Ctrl-C ends the waiting only. Run it on the machine of fit().",
        "  distrain stop last\n  distrain stop train-2026-11-24_01-02-03-ab12cd",
    )
    parsers.add_run(parser)
    return parser


def run_stop(options: argparse.Namespace) -> int:
    """Stop a run. Return 0 if it was stopped or has finished, 1 if it has failed."""
    from distrain.coordinator.requests import STOP

    run = parsers.run_of(options)
    began = time.monotonic()
    print(f"{run.name}: {_ask(run, STOP)}; waiting for its end", flush=True)
    try:
        for waited_s in _while_running(run):
            print(f"still stopping after {duration(waited_s)}", flush=True)
    except KeyboardInterrupt:
        print("\nthe run goes on stopping; `distrain ls` shows when it has ended")
        return 130
    run = current(run)
    how = "stopped" if run.state == ABORTED else f"the run has {run.state}" if run.state == FINISHED else run.state
    print(f"{how} after {duration(time.monotonic() - began)}{_where_it_stands(run)}")
    return 0 if run.state in (FINISHED, ABORTED) else 1


def _while_running(run: Run) -> Iterable[float]:
    """Wait for the end of a run. Yield the seconds every now and then."""
    began = noticed = time.monotonic()
    while current(run).state in (RUNNING, STARTING):
        time.sleep(_POLL_S)
        if time.monotonic() >= noticed + _NOTICE_S:
            noticed = time.monotonic()
            yield noticed - began


def _where_it_stands(run: Run) -> str:
    from distrain.runs.details import checkpoints_of

    saved = checkpoints_of(run)
    if not saved:
        return "; it has no checkpoint"
    return f"; the latest checkpoint is {saved[-1].name}, at step {saved[-1].step}"


def _ask(run: Run, word: str) -> str:
    """Send a request to a running run, and return the answer. Raise NoSuchRun that says what to do instead."""
    from distrain.coordinator.requests import ask
    from distrain.errors import StorageError
    from distrain.storage.paths import RunPaths
    from distrain.storage.remote_store import local_directory_of

    if run.state not in (RUNNING, STARTING):
        raise NoSuchRun(f"{run.name} is not running: it is {run.state}")
    paths = RunPaths(local_directory_of(run.path))
    if not paths.requests.exists():
        raise NoSuchRun(_unreachable(run))
    try:
        return ask(paths, word)
    except StorageError as error:
        raise NoSuchRun(_unreachable(run) if _host(run) not in (None, platform.node()) else str(error)) from None


def _host(run: Run) -> str | None:
    host = run.manifest.get("host")
    return host if isinstance(host, str) else None


def _unreachable(run: Run) -> str:
    host, pid = _host(run), run.manifest.get("pid")
    if host is None:
        return f"{run.name} takes no requests on this machine; ask on the machine of fit()"
    if host != platform.node():
        return f"{run.name} was started on {host} (process {pid}); run this command there"
    return (
        f"{run.name} takes no requests: it has no workers of its own, or has not begun. Its process is {pid}; "
        f"`kill -TERM {pid}` stops it"
    )

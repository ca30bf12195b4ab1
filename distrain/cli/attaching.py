"""``distrain attach``: return to a run that is at work. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from distrain.cli import parsers
from distrain.cli.requesting import host_of, unreachable
from distrain.cli.text import echo
from distrain.storage.runs.listing import (
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
from distrain.storage.runs.logs import current, log_folder

if TYPE_CHECKING:
    import argparse

    from distrain.decisions.run_status import RunStatus

_POLL_S = 0.1
_KILLED_EXIT = 137
"""The exit code that a shell shows after SIGKILL, by which most runs end whose end nobody has noted."""


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
    from distrain.decisions.run_status import RunStatus

    run = parsers.run_of(options)
    is_at_work = run.state in (RUNNING, STARTING)
    if not is_at_work:
        echo(f"distrain: {run.name} has ended already", sys.stderr)
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
    from distrain.coordinator.store.remote_store import local_directory_of

    if host_of(run) not in (None, platform.node()):
        raise NoSuchRun(unreachable(run))
    local = local_run(str(local_directory_of(run.path)))
    while local.state == STARTING:
        time.sleep(_POLL_S)
        local = current(local)
    if local.state == FOREIGN:  # it has its files on the machine of fit()
        raise NoSuchRun(unreachable(run))
    return local


def _show_live(run: Run, status: RunStatus, last: int) -> None:
    """Show a run in a local directory until it has ended."""
    from distrain.cli.attached_console import AttachedConsole
    from distrain.console.choice import open_console
    from distrain.system.consoles import console_threads

    with (
        console_threads(),
        contextlib.closing(
            open_console("auto" if run.state == RUNNING else "off", status, str(log_folder(run)))
        ) as console,
    ):
        AttachedConsole(run, console, last).show()


def _show_end(run: Run, *, has_lines: bool) -> int:
    """Show how a run has ended, and return the exit code of `distrain run`. ``has_lines``: its last lines are shown."""
    from distrain import errors
    from distrain.cli.attached_console import is_detached
    from distrain.console.error_screen import show_error
    from distrain.storage.runs.details import error_of, reports_of, verdict

    if run.state == KILLED or not (has_lines and is_detached(run)):  # else its last lines say it
        last = deque(reports_of(run), maxlen=1)
        echo(f"distrain: {run.name}: {verdict(run, last[0] if last else None)}", sys.stderr)
    error = error_of(run.location)
    if error and run.state in (FAILED, ABORTED):
        show_error(getattr(errors, str(error.get("type")), errors.DistrainError), str(error.get("message")))
    code = run.manifest.get("exit_code")
    if run.state == KILLED:
        return _KILLED_EXIT
    return code if isinstance(code, int) else int(run.state != FINISHED)

"""``distrain attach``: the console of a running run, as where it was started. Runs in: a process of its own.

The console hears here what the run tells :mod:`distrain.coordinator.attached`.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

from distrain import wire
from distrain.api.observer import Ended
from distrain.api.result import Result
from distrain.cli import parsers
from distrain.cli.requesting import connect
from distrain.cli.text import echo
from distrain.console.live_console import TerminalConsole
from distrain.console.run_console import RunConsole
from distrain.coordinator.attached import VERSIONS, views_in
from distrain.coordinator.requests import ATTACH, REQUEST_TIMEOUT_S
from distrain.coordinator.run.error_screen import show_error
from distrain.decisions.run_status import RunStatus
from distrain.storage.runs.listing import FINISHED, NoSuchRun, Run, run_at
from distrain.system.consoles import Footer, console_threads
from distrain.system.log import say
from distrain.system.process import user_of_peer

if TYPE_CHECKING:
    import argparse

    from distrain.coordinator.attached import News
    from distrain.wire.channel import Channel

_POLL_S = 0.1
_SOON_S = 2.0
"""Seconds in which a run that was killed counts as such."""


def run_attach(options: argparse.Namespace) -> int:
    """Show the console of a running run until it ends, and return its exit code. Ctrl-C only detaches."""
    run = parsers.run_of(options, waits=True)
    try:
        with console_threads(), closing(connect(run)) as channel:
            is_over = _show_console(run, channel)
    except KeyboardInterrupt:
        echo(f"\ndetached; the run continues. To stop it: distrain stop {shlex.quote(run.path)}", sys.stderr)
        return 130
    deadline = time.monotonic() + _SOON_S
    while (run := run_at(run.location)).is_active and not is_over and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if not is_over and run.is_active:
        echo("distrain: detached, because this process read too slowly; the run continues", sys.stderr)
    elif run.state != FINISHED and (error := Result.from_path(run.path).error):
        show_error(error)
    elif not is_over:
        echo(f"distrain: {run.name} has {run.state}; this process read too slowly to show its end", sys.stderr)
    code = run.manifest.get("exit_code")
    return code if isinstance(code, int) else 1


def _show_console(run: Run, channel: Channel) -> bool:
    """Show the console of a run. Return True once the run has ended, False if only the connection has."""
    if user_of_peer(channel.read_fd) != os.geteuid():
        raise NoSuchRun(f"{run.name} belongs to another user, who alone can attach to it")
    channel.queue(wire.Ask(attempt=0, rank=0, what=ATTACH, body=VERSIONS.encode()))
    views, is_over = views_in(channel.wait(REQUEST_TIMEOUT_S)), False
    say(f"attached to {run.path}")
    status = RunStatus(run.path, time.monotonic())
    pinned = Footer.pin()
    console = TerminalConsole(status, pinned, stops=False) if pinned else RunConsole(status)
    try:
        while True:
            for newest, news in views:
                for name in RunStatus.__slots__:
                    setattr(status, name, getattr(newest, name))
                for one in news:
                    is_over = isinstance(one, Ended)
                    _show(one, console)
            if is_over or channel.at_end:
                return is_over
            console.tick(time.monotonic())
            due = console.deadline()
            views = views_in(channel.wait(None if due is None else max(due - time.monotonic(), 0.0)))
    finally:
        if not is_over:
            console.close()


def _show(news: News, console: RunConsole) -> None:
    if not isinstance(news, dict):
        console.hear(news)
        return
    console.flush(time.monotonic())  # the lines before come first
    logging.getLogger("distrain").handle(logging.makeLogRecord(news))

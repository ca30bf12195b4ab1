"""``distrain attach``: return to a running run, by the files in its directory. Runs in: coordinator.

The lines come from the logs of its ranks. The footer shows what run.json, metrics.jsonl and events.jsonl say.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from distrain.cli import parsers
from distrain.cli.requesting import host_of, unreachable
from distrain.cli.text import echo
from distrain.storage import names
from distrain.storage.lines import event_in, record_in
from distrain.storage.lock_probe import is_locked
from distrain.storage.runs.listing import (
    ABORTED,
    ENDED,
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
from distrain.storage.runs.logs import POLL_S, Follower, current, log_folder

if TYPE_CHECKING:
    import argparse

    from distrain.console.run_console import RunConsole
    from distrain.decisions.run_status import RunStatus

_KILLED_EXIT = 137
"""The exit code that a shell shows after SIGKILL, by which most runs end whose end nobody has noted."""
_RECENT_BYTES = 1 << 20
"""The last part of a file that tells how far a run is."""


def attach_parser() -> argparse.ArgumentParser:
    """Make the parser of ``distrain attach``."""
    parser = parsers.make_parser(
        "attach",
        "Return to a run of this machine: show its output and progress until its end, as in the terminal that started "
        "it. Ctrl-C leaves the run alone. The exit code is that of `distrain run`.",
        "  nohup distrain run --name big train.py &\n  distrain attach big",
    )
    parsers.add_run(parser)
    parser.add_argument(
        "-n", type=parsers.number, default=20, metavar="LINES", help="the lines to begin with (default: 20)"
    )
    return parser


def run_attach(options: argparse.Namespace) -> int:
    """Show a run until it ends. Return the exit code of the run, 130 after Ctrl-C."""
    run = parsers.run_of(options)
    advice = f"`distrain stop {parsers.named_again(options, run)}` stops it"
    if run.state in (RUNNING, STARTING):
        try:
            run = _begun_here(run)
            _show_live(run, f"Ctrl-C leaves the run alone; {advice}", options.n)
        except KeyboardInterrupt:
            print(f"\ndistrain: the run keeps running; {advice}", file=sys.stderr)
            return 130
    else:
        echo(f"distrain: {run.name} has already ended", sys.stderr)
    return _show_end(current(run))


def _begun_here(run: Run) -> Run:
    """Return a running run in its local directory, once it has begun. Raise NoSuchRun if it runs elsewhere."""
    from distrain.coordinator.store.remote_store import local_directory_of

    if host_of(run) not in (None, platform.node()):
        raise NoSuchRun(unreachable(run))
    local = local_run(str(local_directory_of(run.path)))
    while local.state == STARTING:
        time.sleep(POLL_S)
        local = current(local)
    if local.state == FOREIGN:  # it has its files on the machine of fit()
        raise NoSuchRun(unreachable(run))
    return local


def _show_live(run: Run, advice: str, last: int) -> None:
    from distrain.console.choice import open_console
    from distrain.decisions.run_status import RunStatus
    from distrain.system.consoles import console_threads

    status = RunStatus(run.path, started=time.monotonic(), advice=advice)
    with (
        console_threads(),
        contextlib.closing(open_console("auto", status, str(log_folder(run)))) as console,
        contextlib.closing(Attached(run, status, last)) as attached,
    ):
        show_until_end(attached, console)


def show_until_end(attached: Attached, console: RunConsole) -> None:
    """Show a run on a console, whose footer shows the status, until the run has ended."""
    while True:
        is_over = attached.has_ended()
        for line in attached.new_lines(is_over=is_over):
            print(line, flush=True)
        attached.update(time.monotonic())
        console.tick(time.monotonic())
        if is_over:
            return
        time.sleep(POLL_S)


def _show_end(run: Run) -> int:
    """Show how a run has ended, and return the exit code of `distrain run`."""
    from distrain import errors
    from distrain.console.error_screen import show_error
    from distrain.storage.runs.details import error_of, reports_of, verdict

    last = deque(reports_of(run), maxlen=1)
    echo(f"distrain: {run.name}: {verdict(run, last[0] if last else None)}", sys.stderr)
    error = error_of(run.location)
    if error and run.state in (FAILED, ABORTED):
        show_error(getattr(errors, str(error.get("type")), errors.DistrainError), str(error.get("message")))
    code = run.manifest.get("exit_code")
    if run.state == KILLED:
        return _KILLED_EXIT
    return code if isinstance(code, int) else int(run.state != FINISHED)


class Attached:
    """A run of another process: its new lines, and its status, which is kept up to date.

    run: in a local directory. last: the number of lines to begin with.
    """

    def __init__(self, run: Run, status: RunStatus, last: int) -> None:
        self._run = run
        self._status = status
        folder = Path(run.path)
        self._reports = _Tail(folder / names.METRICS)
        self._events = _Tail(folder / names.EVENTS)
        self._follower = Follower(run, None, None, max(1, last // max(run.ranks, 1)))
        self._attempt = -1

    def close(self) -> None:
        self._reports.close()
        self._events.close()

    def has_ended(self) -> bool:
        """Return whether the run has ended."""
        return current(self._run).state not in (RUNNING, STARTING) and not is_locked(self._run.path)

    def new_lines(self, *, is_over: bool) -> list[str]:
        """Return the lines that are new. Nothing in them acts on the terminal."""
        with contextlib.suppress(FileNotFoundError):  # the local files of a remote run are deleted at its end
            now, ranks = time.monotonic(), self._status.ranks
            found = list(self._follower.new_lines(is_over=is_over))
            for rank in {rank for _, rank, _ in found if rank < len(ranks)}:
                ranks[rank].seen = now
            return [f"[rank {rank}] {line}" for _, rank, line in found]
        return []

    # -- the status -----------------------------------------------------------------------------------------------

    def update(self, now: float) -> None:
        """Bring the status up to date. run.json is read after the other files, so that it knows their attempts."""
        reports, events = self._reports.new(), self._events.new()
        run, status = current(self._run), self._status
        if run.is_run:
            status.started = _moment(run.began, now)
        if attempts := run.attempts_now:
            self._note_attempt(attempts, run, now)
        if run.state in ENDED:
            status.phase = run.state
        for line in reports:
            self._note_report(line, now)
        for line in events:
            event = event_in(line)
            if event is not None and event["event"] == "checkpoint":
                status.checkpoint, status.checkpoint_at = event["name"], _moment(event["time"], now)

    def _note_attempt(self, attempts: list[dict[str, Any]], run: Run, now: float) -> None:
        status, attempt = self._status, attempts[-1]
        if attempt["attempt"] != self._attempt:
            self._attempt = attempt["attempt"]
            hosts = {rank: host for host, ranks in run.hosts.items() for rank in ranks}
            status.begin_attempt([hosts[rank] for rank in sorted(hosts)], now)
            status.restarts, status.phase = len(attempts) - 1, "starting"
        if status.phase == "starting" and attempt.get("training"):
            status.phase = "running"
            for rank, state in enumerate(status.ranks):
                if state.begun is None:
                    status.rank_begins(rank, _moment(attempt["training"], now))

    def _note_report(self, line: bytes, now: float) -> None:
        record = record_in(line, "a line of metrics.jsonl")
        if record is None or record.get("attempt") != self._attempt or record["rank"] >= len(self._status.ranks):
            return
        rank, at = record["rank"], _moment(record["time"], now)
        if self._status.ranks[rank].begun is None:  # other ranks are still starting
            self._status.rank_begins(rank, at)
        self._status.reported(rank, record["index"], record["metrics"], record.get("progress"), at)


def _moment(wall: float, now: float) -> float:
    """Return a time of the clock as one of time.monotonic. Clocks of other hosts may be ahead."""
    return now - max(0.0, time.time() - wall)


class _Tail:
    """The lines that are appended to a file, from near its end on.

    It stays open: the files of a remote run are deleted at its end, and have their last lines then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def new(self) -> list[bytes]:
        """Return the whole lines that are new."""
        try:
            data = self._rest + (self._file or self._open()).read()
        except FileNotFoundError:
            return []
        *lines, self._rest = data.split(b"\n")
        return lines

    def _open(self) -> IO[bytes]:
        self._file = self._path.open("rb")
        start = max(0, self._file.seek(0, os.SEEK_END) - _RECENT_BYTES)
        self._file.seek(start)
        if start:
            self._file.readline()
        return self._file

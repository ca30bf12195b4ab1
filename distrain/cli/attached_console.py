"""The console of a run of another process, from the files in its directory. Runs in: coordinator.

The lines of the ranks come from their logs. Those of distrain come from console.log, if the run is detached. The footer
shows what run.json, metrics.jsonl and events.jsonl say.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING

from distrain.api.observer import AttemptBegan, AttemptEnded, BecameSlow, Printed, RankTrains, Reported
from distrain.coordinator.observers import Observers
from distrain.decisions.output_lines import readable
from distrain.storage import names
from distrain.storage.lines import event_in, record_in
from distrain.storage.lock_probe import is_locked
from distrain.storage.runs.listing import ENDED, RUNNING, STARTING, Run
from distrain.storage.runs.logs import POLL_S, Follower, current, log_folder
from distrain.system.log import print_to, say, warn
from distrain.system.text import without_controls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrain.console.run_console import RunConsole

_RECENT_BYTES = 1 << 20
"""The last part of a file that tells how far a run is."""
_ENDING_S = 90.0
"""Seconds for which a run that says how it has ended may still have the lock, on a file system that has locks."""
_OWN = "distrain: "
_ERROR_SCREEN = re.compile("─+ distrain: ")
"""The first line of the error with which `distrain run` ends."""


class AttachedConsole:
    """A run, shown on a console of this process.

    run: in a local directory. console: its status gets the state of the run. last: the number of lines to begin with.
    """

    def __init__(self, run: Run, console: RunConsole, last: int) -> None:
        self._run = run
        self._console = console
        self._status = console.status
        self._observers = Observers(console.status, [console])
        folder = Path(run.path)
        self._reports = _Tail(folder / names.METRICS)
        self._events = _Tail(folder / names.EVENTS)
        self._lines = _Tail(folder / names.CONSOLE) if is_detached(run) else None
        self._is_in_error = False
        """True after the beginning of an error in console.log."""
        self._last = last
        self._attempt = -1
        self._is_caught_up = False
        """True once it is shown where the run is."""
        self._follower: Follower | None = None
        """None if console.log has the lines of the ranks, too."""
        if self._lines is None:
            self._follower = Follower(run, _shown_ranks(run), None, max(1, last // max(run.ranks, 1)))

    def show(self) -> None:
        """Show the run until it has ended. Raise BrokenPipeError if nobody reads that any more."""
        with self._reports, self._events, self._lines or contextlib.nullcontext():
            is_over = False
            while not is_over:
                _check_reader()
                before = current(self._run)
                is_over = _has_ended(before)
                self._advance(time.monotonic(), is_ending=before.state not in (RUNNING, STARTING))
                self._observers.tick(time.monotonic())
                if not is_over:
                    time.sleep(POLL_S)

    def _advance(self, now: float, *, is_ending: bool) -> None:
        """Show what is new. run.json is read after the other files, so that it knows the attempts in them."""
        output: list[tuple[int, int, bytes]] = []
        with contextlib.suppress(FileNotFoundError):  # the local files of a remote run are deleted at its end
            output += self._follower.new_output(is_over=is_ending) if self._follower is not None else ()
        reports, events = self._reports.new(), self._events.new()
        run = current(self._run)
        for attempt, rank, data in output:
            if attempt > self._attempt:
                self._note_state(run, now)
            self._show_output(rank, data, now)
        self._note_state(run, now)
        for line in reports:
            self._take_report(line, now)
        for line in events:
            self._take_event(line, now)
        self._show_own_lines()
        self._is_caught_up = True

    # -- run.json -------------------------------------------------------------------------------------------------

    def _note_state(self, run: Run, now: float) -> None:
        """Note the attempt that run.json has, and that its ranks train."""
        attempts, status = run.attempts_now, self._status
        status.started = _moment(run.began, now) if run.is_run else status.started
        if attempts and attempts[-1]["attempt"] != self._attempt:
            self._begin_attempt(run, now)
        if attempts and status.phase == "starting" and attempts[-1].get("training"):
            status.phase = "running"
            for rank, state in enumerate(status.ranks):
                if state.begun is None:
                    self._observers.tell(RankTrains(rank, _moment(attempts[-1]["training"], now)))
        if run.state in ENDED:
            status.phase = run.state

    def _begin_attempt(self, run: Run, now: float) -> None:
        attempts = run.attempts_now
        if self._attempt >= 0:
            self._observers.tell(AttemptEnded(self._attempt, [], None, dict))
        self._attempt = attempts[-1]["attempt"]
        hosts = {rank: host for host, ranks in run.hosts.items() for rank in ranks}
        self._observers.tell(AttemptBegan(self._attempt, [hosts[rank] for rank in sorted(hosts)], now))
        self._status.restarts, self._status.phase = len(attempts) - 1, "starting"
        if self._lines is not None or run.state != RUNNING:
            return
        if not self._log(0).parent.exists():
            say("train_func runs in the process of fit(), which has its output; here are its reports")
        elif self._is_caught_up and len(attempts) > 1:
            warn(f"attempt {self._attempt} begins, after: {attempts[-2].get('failure')}")

    def _log(self, rank: int) -> Path:
        return Path(str(log_folder(self._run)), f"attempt_{self._attempt}", f"rank_{rank}.log")

    # -- output ---------------------------------------------------------------------------------------------------

    def _show_output(self, rank: int, data: bytes, now: float) -> None:
        if rank >= len(self._status.ranks):
            return
        if not self._is_caught_up:
            whole, _, data = data.rpartition(b"\n")
            if whole and rank < self._last:
                self._console.print_as_it_is(rank, 1, readable(whole + b"\n", rank))
            with contextlib.suppress(FileNotFoundError):
                now = _moment(self._log(rank).stat().st_mtime, now)
        self._observers.tell(Printed(rank, 1, data, now))

    def _show_own_lines(self) -> None:
        """Show new lines of console.log."""
        lines = list(self._own_lines())
        for line in lines if self._is_caught_up else lines[max(0, len(lines) - self._last) :]:
            print_to(sys.stdout, f"{line}\n")

    def _own_lines(self) -> Iterator[str]:
        """Yield the new lines of console.log, without the errors with which runs end."""
        for data in self._lines.new() if self._lines is not None else ():
            line = without_controls(data.decode(errors="replace").rstrip("\r"))
            self._is_in_error = not line.startswith(_OWN) and (self._is_in_error or bool(_ERROR_SCREEN.match(line)))
            if not self._is_in_error:
                yield line

    # -- reports and events ---------------------------------------------------------------------------------------

    def _take_report(self, line: bytes, now: float) -> None:
        record = record_in(line, "a line of metrics.jsonl")
        if record is None or record.get("attempt") != self._attempt or record["rank"] >= len(self._status.ranks):
            return
        rank, at = record["rank"], _moment(record["time"], now)
        if self._status.ranks[rank].begun is None:  # other ranks are still starting
            self._observers.tell(RankTrains(rank, at))
        shows = self._is_caught_up and self._follower is not None  # else console.log has lines about the progress
        tell = self._observers.tell if shows else self._status.hear
        index, metrics = record["index"], record["metrics"]
        tell(Reported(rank, index, self._run.step_of(record), metrics, record.get("progress"), at))

    def _take_event(self, line: bytes, now: float) -> None:
        event = event_in(line)
        if event is None:
            return
        if event["event"] == "checkpoint":
            self._status.checkpoint, self._status.checkpoint_at = event["name"], _moment(event["time"], now)
        elif event["event"] == "slow" and self._is_caught_up and self._lines is None:
            with contextlib.suppress(KeyError, TypeError):  # another version of distrain has written it
                warn(str(BecameSlow(**{field.name: event[field.name] for field in fields(BecameSlow)})))


def is_detached(run: Run) -> bool:
    """Return True if the lines of distrain about the run are in its console.log."""
    return run.manifest.get("detached") is True


def _shown_ranks(run: Run) -> list[int] | None:
    """Return the ranks whose output the user wants to see (``LoggingConfig.ranks``), None for all."""
    config = run.manifest.get("run_config")
    logging = config.get("logging_config") if isinstance(config, dict) else None
    ranks = logging.get("ranks") if isinstance(logging, dict) else None
    return ranks if isinstance(ranks, list) else None


def _moment(wall: float, now: float) -> float:
    """Return a time of the clock as one of time.monotonic. Clocks of other hosts may be ahead."""
    return now - max(0.0, time.time() - wall)


def _has_ended(run: Run) -> bool:
    if run.state in (RUNNING, STARTING):
        return False
    return not is_locked(run.path) or time.time() > run.ended + _ENDING_S


def _check_reader() -> None:
    """Raise BrokenPipeError if stdout is a pipe or a terminal without another end. Prints ignore that."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if poll.poll(0):
        raise BrokenPipeError


class _Tail:
    """The lines that are appended to a file, from near its end on.

    It stays open: the files of a remote run are deleted at its end, and have their last lines then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""

    def __enter__(self) -> _Tail:
        return self

    def __exit__(self, *_: object) -> None:
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

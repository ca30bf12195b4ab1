"""A run that needs no terminal: it goes on in a process of its own, and its console is a file. Runs in: coordinator.

``distrain run --detach`` forks, before anything has begun. The child leaves the session of the terminal and is the run.
It writes to a nameless file until it has a run directory, then to console.log there. The parent shows what the child
writes until the ranks train.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from distrain.errors import StorageError
from distrain.storage.names import CONSOLE, DEFAULT_STORAGE, REQUESTS
from distrain.storage.ownership import open_without_links
from distrain.storage.runs.listing import RUNNING, local_run
from distrain.system import process
from distrain.system.log import say

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from distrain.storage.paths import RunPaths

_POLL_S = 0.1
_COPY_BYTES = 1 << 20
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
"""Signals to the parent that stop the run until the ranks train. A closed terminal only ends the parent."""


def run_detached(train: Callable[[DetachedConsole], int]) -> int:
    """Return the exit code of this process, which is two processes from now on.

    In the one without a terminal, it is that of ``train``. In the other one, it is 0 as soon as the ranks train; if the
    run has ended before, it is that of the run.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_FORWARDED, signal.SIGHUP))  # until each process is ready for them
    with tempfile.TemporaryFile() as beginning:
        read_fd, write_fd = os.pipe()
        _flush()
        child = os.fork()
        if child:
            os.close(write_fd)
            return _Parent(child, beginning, read_fd).show_beginning()
        os.close(read_fd)
        _leave_terminal(beginning.fileno())
        return train(DetachedConsole(beginning, write_fd))


def _leave_terminal(output_fd: int) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_FORWARDED, signal.SIGHUP))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    _write_to(output_fd)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # whoever follows the file sees each line at once


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()


def _write_to(fd: int) -> None:
    """Write stdout and stderr of this process to a file from now on. Call :func:`_flush` before."""
    for number in (1, 2):
        os.dup2(fd, number)


class DetachedConsole:
    """The console of a run that has no terminal.

    beginning: the file to which the run has written so far. parent_fd: a pipe to the process in front.
    """

    def __init__(self, beginning: IO[bytes], parent_fd: int) -> None:
        self._beginning = beginning
        self._parent_fd = parent_fd

    def move_to(self, paths: RunPaths, location: str) -> None:
        """Write to the console.log of the run from now on. Raise StorageError if that is not possible.

        location: the run directory as users know it.
        """
        _flush()
        try:
            with open(paths.console, "ab", opener=open_without_links) as console:
                start = console.tell()
                self._beginning.seek(0)
                shutil.copyfileobj(self._beginning, console)
                console.flush()
                _write_to(console.fileno())
        except OSError as error:
            raise StorageError(f"cannot write {paths.console}: {error}") from error
        news = {"folder": str(paths.root), "location": location, "start": start}
        with contextlib.suppress(BrokenPipeError):  # the process in front is gone, and so is its terminal
            os.write(self._parent_fd, json.dumps(news).encode())  # it stays open: its end is the end of the run


class _Parent:
    """The process in front. It shows what the run writes, until the ranks train or the run has ended."""

    def __init__(self, child: int, beginning: IO[bytes], news_fd: int) -> None:
        self._child = child
        self._console: IO[bytes] = beginning
        self._shown = 0
        """The position in the console up to which it is shown."""
        self._news_fd = news_fd
        self._is_ending = False
        self._run = self._location = ""
        """The directory with the files of the run, and the run directory as users know it; "" until they are known."""

    def show_beginning(self) -> int:
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_FORWARDED, signal.SIGHUP))
        while True:
            ended, status = os.waitpid(self._child, 0 if self._is_ending else os.WNOHANG)
            self._show()
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if self._trains():
                self._show_ways_back()
                return 0
            if select.select([self._news_fd], [], [], _POLL_S)[0]:
                self._read_news()

    def _forward(self, number: int, _: FrameType | None) -> None:
        process.kill(self._child, number)

    def _show(self) -> None:
        while data := os.pread(self._console.fileno(), _COPY_BYTES, self._shown):
            self._shown += len(data)
            with contextlib.suppress(OSError, ValueError):  # the terminal is closed
                sys.stderr.buffer.write(data)
                sys.stderr.buffer.flush()

    def _read_news(self) -> None:
        """Go on with console.log. The run has copied there what it has written before."""
        data = os.read(self._news_fd, _COPY_BYTES)
        if not data:
            self._is_ending = True
            return
        news = json.loads(data)
        self._run, self._location = news["folder"], news["location"]
        with contextlib.suppress(FileNotFoundError):  # a remote run has ended meanwhile
            self._console = Path(self._run, CONSOLE).open("rb")  # noqa: SIM115 - it is read until this process ends
            self._shown += news["start"]

    def _trains(self) -> bool:
        """Tell if all ranks of the last attempt have begun train_func."""
        if not self._run:
            return False
        run = local_run(self._run)
        is_ours = run.state == RUNNING and run.manifest.get("pid") == self._child  # else it has just ended, or begun
        return is_ours and bool(run.attempts_now) and run.attempts_now[-1].get("training") is not None

    def _show_ways_back(self) -> None:
        folder, _, name = self._location.rpartition("/")
        known = name if folder == os.path.expanduser(DEFAULT_STORAGE) else shlex.quote(self._location)
        takes_requests = os.path.exists(os.path.join(self._run, REQUESTS))  # else train_func runs in the child
        stop = f"distrain stop {known}" if takes_requests else f"kill -TERM {self._child}"
        say(
            f"training has begun, and goes on when this terminal is closed (process {self._child})\n"
            f"    to return to it:  distrain attach {known}\n"
            f"    to stop it:       {stop}"
        )

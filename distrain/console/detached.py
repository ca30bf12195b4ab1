"""A run that needs no terminal: it continues in a process of its own, and its console is a file. Runs in: coordinator.

``distrain run --detach`` forks, before anything has begun. The child leaves the session of the terminal and is the run.
It writes to console.log as soon as it has a run directory. The parent shows that file until the ranks train.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import time
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
_MOST_NEWS = 1 << 16
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
"""Signals to the parent that stop the run until the ranks train. A closed terminal only ends the parent."""


def run_detached(train: Callable[[Callable[[RunPaths, str], None]], int]) -> int:
    """Return the exit code of this process, which is two processes from now on.

    In the child, it is that of ``train``, which calls its argument once it has a run directory. In the parent, it is 0
    as soon as the ranks train; if the run ends before, it is that of the run.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_FORWARDED, signal.SIGHUP))  # until each process is ready for them
    read_fd, write_fd = os.pipe()
    _flush()
    child = os.fork()
    if child:
        os.close(write_fd)
        return _show_beginning(child, read_fd)
    os.close(read_fd)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_FORWARDED, signal.SIGHUP))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return train(lambda paths, location: _leave_terminal(paths, location, write_fd))


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()


def _leave_terminal(paths: RunPaths, location: str, parent_fd: int) -> None:
    """Write to the console.log of the run from now on, and tell the parent where that is. Raise StorageError.

    location: the run directory as users know it.
    """
    _flush()
    try:
        with open(paths.console, "ab", opener=open_without_links) as console:
            start = console.tell()
            os.dup2(console.fileno(), 1)
            os.dup2(console.fileno(), 2)
    except OSError as error:
        raise StorageError(f"cannot write {paths.console}: {error}") from error
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # whoever follows the file sees each line at once
    news = {"folder": str(paths.root), "location": location, "start": start}
    with contextlib.suppress(BrokenPipeError):  # the parent is gone, and so is its terminal
        os.write(parent_fd, json.dumps(news).encode())
    os.close(parent_fd)


# -- the parent ------------------------------------------------------------------------------------------------------


def _show_beginning(child: int, news_fd: int) -> int:
    """Show what the run writes, until the ranks train or the run has ended."""

    def forward(number: int, _: FrameType | None) -> None:
        process.kill(child, number)

    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_FORWARDED, signal.SIGHUP))
    told = os.read(news_fd, _MOST_NEWS)
    if not told:  # it has ended before it had a run directory
        return _exit_code(os.waitpid(child, 0)[1])
    news = json.loads(told)
    with contextlib.ExitStack() as stack:
        console = None
        with contextlib.suppress(FileNotFoundError):  # a remote run has ended meanwhile
            console = stack.enter_context(Path(news["folder"], CONSOLE).open("rb"))
            console.seek(news["start"])
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            _show(console)
            if ended:
                return _exit_code(status)
            if _trains(news["folder"], child):
                _show_ways_back(news["folder"], news["location"], child)
                return 0
            time.sleep(_POLL_S)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _show(console: IO[bytes] | None) -> None:
    if console is not None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed
            sys.stderr.buffer.write(console.read())
            sys.stderr.buffer.flush()


def _trains(folder: str, child: int) -> bool:
    """Return whether all ranks of the last attempt have begun train_func."""
    run = local_run(folder)
    is_ours = run.state == RUNNING and run.manifest.get("pid") == child  # else it has just ended, or begun
    return is_ours and bool(run.attempts_now) and run.attempts_now[-1].get("training") is not None


def _show_ways_back(folder: str, location: str, child: int) -> None:
    storage, _, name = location.rpartition("/")
    known = name if storage == os.path.expanduser(DEFAULT_STORAGE) else shlex.quote(location)
    takes_requests = os.path.exists(os.path.join(folder, REQUESTS))  # else train_func runs in the child
    stop = f"distrain stop {known}" if takes_requests else f"kill -TERM {child}"
    say(
        f"training has begun, and continues when this terminal is closed (process {child})\n"
        f"    to return to it:  distrain attach {known}\n"
        f"    to stop it:       {stop}"
    )

"""Signals that stop a run, and that keep this process from starting another one. Runs in: coordinator."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import stat
import threading
from typing import TYPE_CHECKING

from distrain.errors import PreemptionError
from distrain.system.loop import SignalRelay
from distrain.system.text import signal_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Ctrl-C, the usual request to end, a closed terminal or lost connection, and Ctrl-backslash. All stop the run in the
same way, but only Ctrl-C ends ``fit()`` with a KeyboardInterrupt."""


def stop_signals(names: Sequence[str] | None = None) -> tuple[signal.Signals, ...]:
    """Return the signals that stop a run of this process.

    names: those that the user has chosen; by default :data:`STOP_SIGNALS`. In a job of Slurm these include SIGUSR1 and
    SIGUSR2, unless the user handles them: users choose one of these for ``--signal``, with which Slurm announces the
    time limit.
    """
    if names is not None:
        return tuple(signal.Signals[name] for name in names)
    if "SLURM_JOB_ID" not in os.environ:
        return STOP_SIGNALS
    announcing = (signal.SIGUSR1, signal.SIGUSR2)
    return (*STOP_SIGNALS, *(number for number in announcing if signal.getsignal(number) is signal.SIG_DFL))


_stopped_by: list[str] = []
"""The signal, other than Ctrl-C, that has stopped runs of this process."""


def exit_code(stop_reason: str) -> int:
    """Return the exit code of a process that was stopped for this reason."""
    return 128 + signal.Signals[signal_of(stop_reason)]


def note_stop(reason: str) -> None:
    """Remember what stopped this process, except Ctrl-C.

    KeyboardInterrupt passes through ``except Exception``. A program that catches it wants to continue, like a notebook.
    """
    if reason != "SIGINT":
        _stopped_by.append(reason)
    if reason == "SIGHUP":
        _leave_closed_terminal()


def _leave_closed_terminal() -> None:
    """Redirect stdout and stderr to /dev/null if their terminal was closed, as every print would raise OSError."""
    with open(os.devnull, "w") as nowhere:
        for fd in (1, 2):
            with contextlib.suppress(OSError):
                if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):
                    os.dup2(nowhere.fileno(), fd)


@contextlib.contextmanager
def during_fit() -> Iterator[None]:
    """Call the user's handlers of signals that have stopped a run in the block, at its end.

    In another thread than the main one, the end of the interpreter counts as Ctrl-C, and waits for the block.
    """
    before, relay, ended, pid = len(_stopped_by), SignalRelay(), threading.Event(), os.getpid()

    def interrupt() -> None:
        if os.getpid() == pid:  # not a child that was forked meanwhile
            relay.pass_on(signal.SIGINT)
            ended.wait()

    atexit.register(interrupt)
    try:
        with contextlib.nullcontext() if threading.current_thread() is threading.main_thread() else relay:
            yield
    finally:
        ended.set()
        atexit.unregister(interrupt)
        for name in dict.fromkeys(_stopped_by[before:]):
            number = getattr(signal, name, None)  # None for `distrain stop`
            if number is not None and callable(signal.getsignal(number)):
                signal.raise_signal(number)


def refuse_after_stop() -> None:
    """Raise PreemptionError if a signal, or `distrain stop`, stopped an earlier run of this process.

    A sweep that catches every error would otherwise start its next trial.
    """
    if _stopped_by:
        raise PreemptionError(
            f"{_stopped_by[0]} stopped an earlier run, so this process won't start another; in a sweep, don't catch "
            "PreemptionError, or call fit() in a new process",
            exit_code=exit_code(_stopped_by[0]),
        )

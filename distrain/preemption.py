"""The signals that ask a run to stop, and the memory of them for later runs of the process. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import os
import signal
import stat

from distrain.errors import PreemptionError

__all__ = ["STOP_SIGNALS", "exit_code", "forget_stop", "note_stop", "refuse_after_stop"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Ctrl-C, the usual request to end, a closed terminal or lost connection, and Ctrl-backslash. All are handled alike,
but only Ctrl-C ends ``fit()`` with a KeyboardInterrupt."""

_stopped_by: list[str] = []


def exit_code(stop_reason: str) -> int:
    """Return the exit code of a process that was ended by the signal of this name."""
    return 128 + signal.Signals[stop_reason]


def note_stop(number: int) -> None:
    """Remember that this process was told to stop, unless it was by Ctrl-C.

    KeyboardInterrupt passes through ``except Exception``, so whoever catches it wants to go on, as in a notebook.
    """
    if number != signal.SIGINT:
        _stopped_by.append(signal.Signals(number).name)
    if number == signal.SIGHUP:
        _leave_closed_terminal()


def _leave_closed_terminal() -> None:
    """Let stdout and stderr go to /dev/null if their terminal was closed: every print would raise OSError."""
    with open(os.devnull, "w") as nowhere:
        for fd in (1, 2):
            with contextlib.suppress(OSError):
                if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):
                    os.dup2(nowhere.fileno(), fd)


def refuse_after_stop() -> None:
    """Raise PreemptionError if this process was told to stop during an earlier run.

    A sweep that catches every error would otherwise start its next trial.
    """
    if _stopped_by:
        raise PreemptionError(
            f"no further run is started, as {_stopped_by[0]} has told this process to stop; "
            "let PreemptionError end a sweep that catches errors, or call fit() in a new process",
            exit_code=exit_code(_stopped_by[0]),
        )


def forget_stop() -> None:
    """Allow further runs again, in tests that send signals to their own process."""
    _stopped_by.clear()

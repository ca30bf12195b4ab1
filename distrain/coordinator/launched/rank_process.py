"""The user's process as a rank: its environment and session, and what signals do. Runs in: coordinator."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from distrain.api import current
from distrain.errors import LaunchError
from distrain.system.loop import handler_of
from distrain.worker.user_code import Terminated, terminate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from distrain.worker.session import Session

_training_here = threading.RLock()


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Raise LaunchError if another thread trains in this process."""
    if not _training_here.acquire(blocking=False):
        raise LaunchError(
            "fit() with num_workers=0 was called while another thread trains in this process, which has only one "
            "environment; call one after the other, or let them start workers (num_workers=1)"
        )
    try:
        yield
    finally:
        _training_here.release()


@contextlib.contextmanager
def module_path(path: Sequence[str | None]) -> Iterator[None]:
    """Use this ``sys.path`` within the block, as a worker does."""
    before = sys.path[:]
    sys.path[:] = filter(None, path)
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and undo all changes of the environment after the block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def current_session(session: Session) -> Iterator[None]:
    """Let the public functions use this session within the block."""
    current.session = session
    try:
        yield
    finally:
        current.session = None


@contextlib.contextmanager
def signals(numbers: Sequence[int], takes: Callable[[int], bool]) -> Iterator[None]:
    """Handle signals within the block, except those for which the user has a handler.

    takes: called with each signal. Unless it returns True, an exception ends train_func.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not takes(number):
            (signal.default_int_handler if number == signal.SIGINT else terminate)(number, frame)

    usual: dict[int, Any] = {**dict.fromkeys(numbers, signal.SIG_DFL), signal.SIGINT: signal.default_int_handler}
    is_main = threading.current_thread() is threading.main_thread()
    replaced = {n: handler for n, handler in usual.items() if is_main and handler_of(n) is handler}
    for number in replaced:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def stop_reason(error: BaseException | None) -> str | None:
    """Return the name of the signal that has ended train_func by this exception, or None."""
    if isinstance(error, KeyboardInterrupt):
        return "SIGINT"
    return signal.Signals(error.number).name if isinstance(error, Terminated) else None

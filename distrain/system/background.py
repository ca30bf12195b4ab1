"""Threads: one for slow work, so that the loop never waits for it, and several for work on many files.

Runs in: coordinator, agent, worker, uploader.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import signal
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from distrain.errors import DistrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.system.loop import Loop

_T = TypeVar("_T")
_R = TypeVar("_R")
_THREADS = 4
_POLL_S = 0.0005


class Background:
    """A thread that does one task after the other, and reports each result in the loop's thread.

    The thread starts with the first task. It is a daemon thread: a task that never returns, such as a write to a dead
    file server, does not keep the process from exiting. Without a loop, :meth:`do` does the task at once.
    """

    def __init__(self, loop: Loop | None, name: str) -> None:
        self._loop = loop
        self._name = name
        self._work: deque[tuple[Callable[[], Any], Callable[[Any], None] | None, Callable[[OSError], None] | None]] = (
            deque()
        )
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.pending = 0
        """Number of tasks that have not reported their result yet."""

    def do(
        self,
        work: Callable[[], _T],
        then: Callable[[_T], None] | None = None,
        failed: Callable[[OSError], None] | None = None,
    ) -> None:
        """Do ``work`` after all earlier tasks, then call ``then`` with its result.

        If it raises OSError, ``failed`` is called with that. Any other exception, and an OSError without ``failed``, is
        raised in the loop's thread.
        """
        self.pending += 1
        if self._loop is None:
            self._end(then, failed, *_attempt(work))
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"distrain-{self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                limit = OSError(errno.EAGAIN, f"{error}: raise the limit on processes (ulimit -u, or pids.max)")
                self._end(then, failed, None, limit)
                return
            self._thread = thread
        with self._changed:
            self._work.append((work, then, failed))
            self._changed.notify()

    def report(self, callback: Callable[[], None]) -> None:
        """Call back in the loop's thread. A task in the thread may call this."""
        if self._loop is None:
            callback()
        else:
            self._loop.post(partial(self._unless_closed, callback))

    def close(self) -> None:
        """End the thread after its current task. Its result is not reported, and later tasks are dropped."""
        with self._changed:
            self._closed = True
            self._work.clear()
            self._changed.notify()
        self.pending = 0

    # -- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._closed)
                if self._closed:
                    return
                work, then, failed = self._work.popleft()
            self.report(partial(self._end, then, failed, *_attempt(work)))

    # -- in the loop ----------------------------------------------------------------------------------------------

    def _unless_closed(self, callback: Callable[[], None]) -> None:
        if not self._closed:
            callback()

    def _end(
        self,
        then: Callable[[Any], None] | None,
        failed: Callable[[OSError], None] | None,
        result: Any,
        error: BaseException | None,
    ) -> None:
        self.pending -= 1
        if error is None:
            if then is not None:
                then(result)
        elif failed is not None and isinstance(error, OSError):
            failed(error)
        else:
            raise error


def _attempt(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:
        return None, error


def in_threads(function: Callable[[_T], _R], items: Sequence[_T], *, threads: int = _THREADS) -> list[_R]:
    """Return the results of the function for all items, computed in this thread and some others. Raise its error.

    No lock is taken here: if a signal handler raised just after that, the lock would stay taken forever.
    """
    results: dict[int, _R] = {}
    errors: list[BaseException] = []
    ended: list[None] = []
    """One for each of the other threads that has ended."""
    todo = iter(list(enumerate(items)))  # next() of a list's iterator needs no lock

    def work() -> None:
        try:
            for number, item in todo:
                results[number] = function(item)
                if errors:
                    return
        except BaseException as error:
            errors.append(error)

    def help_out() -> None:
        work()
        ended.append(None)

    helpers = 0
    with contextlib.suppress(RuntimeError):  # the user may have no more threads
        while helpers < min(threads, len(items)) - 1:
            _thread.start_new_thread(help_out, ())
            helpers += 1
    work()
    try:
        while len(ended) < helpers:
            time.sleep(_POLL_S)
    except BaseException as error:  # such as an alarm of the user's
        errors.append(error)
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]


def start_hidden_thread(function: Callable[..., object], *arguments: object) -> None:
    """Call a function in a thread. An OSError or DistrainError ends it quietly: whom it sends to is gone.

    Unlike a threading.Thread, train_func does not count it as its own.
    """

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they have to interrupt the main thread
        with contextlib.suppress(OSError, DistrainError):
            function(*arguments)

    _thread.start_new_thread(run, ())

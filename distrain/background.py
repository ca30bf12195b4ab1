"""A thread for work that may take long, so that the loop never waits for it. Runs in: coordinator, agent."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.loop import Loop

__all__ = ["Background", "ignore", "reraise"]

_T = TypeVar("_T")
_READ_BYTES = 4096


class Background:
    """Does one piece of work after the other in a thread, and reports each result in the loop's own thread.

    The thread starts with the first piece of work. It is a daemon: work that never returns, such as a write to a dead
    file server, does not keep the process from ending. Without a loop, :meth:`do` does the work at once.
    """

    def __init__(self, loop: Loop | None, name: str) -> None:
        self._loop = loop
        self._name = name
        self._work: deque[tuple[Callable[[], Any], Callable[[Any], None], Callable[[BaseException], None]]] = deque()
        self._reports: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.pending = 0
        """How many pieces of work have not reported their result yet."""
        self._wake_fds: tuple[int, ...] = ()
        if loop is not None:
            self._wake_fds = os.pipe()
            for fd in self._wake_fds:
                os.set_blocking(fd, False)
            loop.on_readable(self._wake_fds[0], self._read_reports)

    def do(self, work: Callable[[], _T], then: Callable[[_T], None], failed: Callable[[BaseException], None]) -> None:
        """Do ``work`` after all that was ordered before it. Then call ``then`` with its result, or ``failed`` with the
        exception that it raised."""
        if self._loop is None:
            try:
                result = work()
            except BaseException as error:
                failed(error)
            else:
                then(result)
            return
        self.pending += 1
        with self._changed:
            self._work.append((work, then, failed))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"distrain-{self._name}", daemon=True)
            self._thread.start()

    def report(self, callback: Callable[[], None]) -> None:
        """Call back in the loop's thread; for the work in hand."""
        if self._loop is None:
            callback()
            return
        with self._changed:
            if not self._closed:
                self._reports.append(callback)
                with contextlib.suppress(BlockingIOError):  # the pipe is full, so the loop will look anyway
                    os.write(self._wake_fds[1], b".")

    def close(self) -> None:
        """End the thread after the work in hand. Nothing is reported any more, and what was not begun is dropped."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._work.clear()
            self._changed.notify()
            if self._loop is not None:
                self._loop.forget(self._wake_fds[0])
            for fd in self._wake_fds:
                os.close(fd)
        self.pending = 0

    # -- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._closed)
                if self._closed:
                    return
                work, then, failed = self._work.popleft()
            try:
                result = work()
            except BaseException as error:
                self.report(partial(self._end, failed, error))
            else:
                self.report(partial(self._end, then, result))

    # -- in the loop ----------------------------------------------------------------------------------------------

    def _read_reports(self) -> None:
        os.read(self._wake_fds[0], _READ_BYTES)
        while self._reports:
            self._reports.popleft()()

    def _end(self, function: Callable[[Any], None], argument: Any) -> None:
        self.pending -= 1
        function(argument)


def ignore(result: object) -> None:
    """Hear that the work is done, if nobody waits for it."""


def reraise(error: BaseException) -> None:
    """Hear that work has failed which never fails."""
    raise error

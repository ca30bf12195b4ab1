"""A thread for work that may take long, so that the loop never waits for it. Runs in: coordinator, agent."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from distrain.system.loop import Loop

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
        self._work: deque[tuple[Callable[[], Any], Callable[[Any], None] | None, Callable[[OSError], None] | None]] = (
            deque()
        )
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

    def do(
        self,
        work: Callable[[], _T],
        then: Callable[[_T], None] | None = None,
        failed: Callable[[OSError], None] | None = None,
    ) -> None:
        """Do ``work`` after all that was ordered before it, then call ``then`` with its result.

        If it raises OSError, ``failed`` gets that. Any other exception is raised in the loop's thread, and so is that
        one without ``failed``.
        """
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
        self.pending += 1
        with self._changed:
            self._work.append((work, then, failed))
            self._changed.notify()

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
            self.report(partial(self._end_pending, then, failed, *_attempt(work)))

    # -- in the loop ----------------------------------------------------------------------------------------------

    def _read_reports(self) -> None:
        os.read(self._wake_fds[0], _READ_BYTES)
        try:
            while self._reports:
                self._reports.popleft()()
        finally:
            if self._reports and not self._closed:  # one has raised, and the others wait for the next turn
                os.write(self._wake_fds[1], b".")

    def _end_pending(self, *end: Any) -> None:
        self.pending -= 1
        self._end(*end)

    def _end(
        self,
        then: Callable[[Any], None] | None,
        failed: Callable[[OSError], None] | None,
        result: Any,
        error: BaseException | None,
    ) -> None:
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

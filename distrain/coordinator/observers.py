"""The port above the engine: it tells each fact to all observers. Runs in: coordinator.

The engine imports no observer. :data:`OBSERVERS` names the modules that have some.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections import deque
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from distrain.api.observer import (
    AttemptEnded,
    Committed,
    Ended,
    Observer,
    Printed,
    Reported,
    ReportsJoined,
    RunBegan,
)
from distrain.system.log import say, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distrain.api.config import RunContext, UserCallback
    from distrain.api.observer import Fact
    from distrain.decisions.run_status import RunStatus

OBSERVERS = (
    "distrain.coordinator.attached",
    "distrain.console.choice",
    "distrain.page.at_end",
    "distrain.console.on_end",
    "distrain.trackers.observer",
)
"""Modules with a function ``observers(context, run, status)``, which returns those of a run."""
_NOTICE_AFTER_S = 5.0
"""Seconds of waiting for observers after which the user is informed."""
_LONGEST_WAIT_S = 60.0
"""Seconds that the end of a run waits for slow observers."""
_WAIT_WHEN_STOPPED_S = 10.0
"""The limit for a run that was asked to stop: a scheduler kills it soon."""
_IDLE_S = 1.0
_MOST_WAITING = 10_000
"""Facts that may wait for a slow observer. After that, reports and output are left out."""


class LoopObserver(Protocol):
    """An observer that is called in the engine's thread, so that it must not wait for anything.

    One that has to be called from time to time also has ``deadline()`` and ``tick(now)``. One that answers requests of
    other processes also has ``requests``: its actions for :class:`~distrain.coordinator.requests.Requests`.
    """

    @property
    def hears(self) -> Sequence[type[Fact]]: ...

    def hear(self, fact: Fact) -> None: ...


class Observers:
    """The observers of one run."""

    def __init__(self, observers: Iterable[LoopObserver] = ()) -> None:
        self._observers = list(observers)
        self._timed: list[Any] = [one for one in self._observers if hasattr(one, "deadline")]
        self._hearers: dict[type[Fact], list[Callable[[Fact], None]]] = {}
        self.requests = {what: do for one in self._observers for what, do in getattr(one, "requests", {}).items()}

    def tell(self, fact: Fact) -> None:
        """Tell a fact to all who want to hear it."""
        for hear in self._hearers_of(type(fact)):
            hear(fact)

    def _hearers_of(self, kind: type[Fact]) -> list[Callable[[Fact], None]]:
        if kind not in self._hearers:
            self._hearers[kind] = [one.hear for one in self._observers if not one.hears or kind in one.hears]
        return self._hearers[kind]

    def deadline(self) -> float | None:
        """Return when to call :meth:`tick` (time.monotonic), or None."""
        return min((moment for one in self._timed if (moment := one.deadline()) is not None), default=None)

    def tick(self) -> None:
        """Have observers do what is due by now."""
        now = time.monotonic()
        for one in self._timed:
            one.tick(now)

    def end(self, ended: Ended) -> None:
        """Tell all that the run has ended, even if one of them raises an exception, and :meth:`wait`."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.wait, is_stopped=ended.status == "stopped")
            for hear in reversed(self._hearers_of(Ended)):
                stack.callback(hear, ended)

    def wait(self, *, is_stopped: bool) -> None:
        """Wait until slow observers have heard everything, but not for long. Ctrl-C ends the waiting.

        is_stopped: the run was asked to stop.
        """
        slow = [one for one in self._observers if isinstance(one, Threaded)]
        began = time.monotonic()

        def wait(seconds: float) -> list[str]:
            return [one.name for one in slow if not one.mailbox.wait(began + seconds)]

        with contextlib.suppress(KeyboardInterrupt):
            if names := wait(_NOTICE_AFTER_S):
                say(f"waiting for {' and '.join(names)}; Ctrl-C ends the waiting")
                wait(_WAIT_WHEN_STOPPED_S if is_stopped else _LONGEST_WAIT_S)
        for one in slow:
            one.end()


def import_observers() -> None:
    """Import the modules that have observers, which takes a moment."""
    for name in OBSERVERS:
        import_module(name)


def observers_of(context: RunContext, run: RunBegan, status: RunStatus) -> list[LoopObserver]:
    """Return the observers of a run: those of distrain, and those that the user has given."""
    found = [one for name in OBSERVERS for one in import_module(name).observers(context, run, status)]
    given = context.run_config.callbacks or ()
    found += [one for one in given if isinstance(one, Observer)]
    slow = [Threaded(one) if isinstance(one, Observer) else one for one in found]
    callbacks = [one for one in given if not isinstance(one, Observer)]
    return [*slow, *([Callbacks(callbacks, context)] if callbacks else [])]


# -- slow observers --------------------------------------------------------------------------------------------------


class _Mailbox:
    """A thread that does one task after the other. It starts with the first one, and is a daemon thread.

    do: does a task. idle: is called about once per second between two tasks, also if there is always one. Without it,
    the thread sleeps until a task comes.

    There is no :class:`queue.Queue` here, as ``queue.py`` may be the user's own module.
    """

    def __init__(self, name: str, do: Callable[[Any], None], idle: Callable[[], None] | None = None) -> None:
        self._name = name
        self._do = do
        self._idle = idle or (lambda: None)
        self._idle_s = _IDLE_S if idle else threading.TIMEOUT_MAX
        self._tasks: deque[Any] = deque()
        self._is_working = self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: Any) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._tasks.append(task)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"distrain-{self._name}", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                warn(f"{self._name} is disabled: {error}; raise the limit on processes (ulimit -u, or pids.max)")
                self.close()

    def wait(self, deadline: float) -> bool:
        """Wait until everything is done. Return False after the deadline (time.monotonic)."""
        with self._changed:
            left_s = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
            return self._changed.wait_for(lambda: not (self._tasks or self._is_working), left_s)

    def close(self) -> None:
        """End the thread after its current task."""
        with self._changed:
            self._is_closed = True
            self._tasks.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        idle_at = time.monotonic() + self._idle_s
        while True:
            with self._changed:
                self._is_working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._tasks or self._is_closed, idle_at - time.monotonic())
                if self._is_closed:
                    return
                self._is_working = bool(self._tasks) and time.monotonic() < idle_at
                task = self._tasks.popleft() if self._is_working else None
            if task is not None:
                self._do(task)
            else:
                self._idle()
                idle_at = time.monotonic() + self._idle_s


class Threaded:
    """An observer in a thread of its own."""

    def __init__(self, observer: Observer) -> None:
        self.hears = observer.hears
        self.name = observer.name or type(observer).__name__
        self._observer = observer
        self._has_failed = False
        self._left_out = 0
        idle = None if type(observer).idle is Observer.idle else partial(self._guard, observer.idle)
        self.mailbox = _Mailbox(self.name, partial(self._guard, observer.hear), idle)

    def hear(self, fact: Fact) -> None:
        if len(self.mailbox) >= _MOST_WAITING and isinstance(fact, (Reported, Printed, ReportsJoined)):
            self._left_out += 1
        else:
            self.mailbox.add(fact)

    def end(self) -> None:
        """End the thread, now or when the observer returns."""
        if not self.mailbox.wait(0.0):
            advice = self._observer.advice or "the run does not wait any longer"
            warn(f"{self.name} has not returned; {advice}")
        if self._left_out:
            warn(f"{self.name} was too slow, and missed {self._left_out} reports or pieces of output")
        self.mailbox.close()

    def _guard(self, call: Callable[..., None], *facts: Fact) -> None:
        """Show the first exception, and ignore the others."""
        try:
            call(*facts)
        except BaseException as error:  # SystemExit, too
            if not self._has_failed:
                self._has_failed = True
                text = traceback.format_exc().rstrip()
                warn(f"{self.name} failed; the run continues: {type(error).__name__}: {error}\n{text}")


class Callbacks:
    """The user's callbacks, called one after the other.

    before_run() and after_run() are called in the thread of fit(), the others in a thread of their own.
    """

    hears = (RunBegan, ReportsJoined, Committed, AttemptEnded, Ended)

    def __init__(self, callbacks: Sequence[UserCallback], context: RunContext) -> None:
        self._callbacks = callbacks
        self._context = context
        self._failed: set[str] = set()
        self._mailbox = _Mailbox("callbacks", lambda task: self._call_all(*task))

    def hear(self, fact: Fact) -> None:
        match fact:
            case RunBegan():
                self._call_all("before_run", list)
            case ReportsJoined(metrics, checkpoint):
                self._mailbox.add(("after_report", lambda: [list(metrics), checkpoint]))
            case Committed(checkpoint=checkpoint, metrics=metrics):
                self._mailbox.add(("after_checkpoint", lambda: [checkpoint, dict(metrics)]))
            case AttemptEnded(failures=failures, exceptions=exceptions) if failures:
                self._mailbox.add(("after_exception", lambda: [exceptions()]))
            case Ended():
                self._end(fact)

    def _end(self, ended: Ended) -> None:
        """Wait until all callbacks have returned; Ctrl-C ends the waiting. Then call after_run()."""
        with contextlib.suppress(KeyboardInterrupt):
            if not self._mailbox.wait(time.monotonic() + _NOTICE_AFTER_S):
                say("waiting for a callback; Ctrl-C ends the waiting")
                self._mailbox.wait(float("inf"))
        is_stuck = not self._mailbox.wait(0.0)
        self._mailbox.close()
        if is_stuck:
            warn("after_run() is not called, as a callback has not returned")
        elif ended.result is not None:
            self._call_all("after_run", lambda: [ended.result, ended.error])

    def _call_all(self, name: str, arguments: Callable[[], Sequence[object]]) -> None:
        """Call a method of every callback.

        arguments: makes new arguments for each callback, because a callback may change them.
        """
        for callback in self._callbacks:
            try:
                getattr(callback, name)(self._context, *arguments())
            except BaseException as error:
                if name in ("before_run", "after_run") and not isinstance(error, Exception):
                    raise  # Ctrl-C, or sys.exit() in the thread of fit()
                who = f"{type(callback).__qualname__}.{name}()"
                if who not in self._failed:
                    self._failed.add(who)
                    warn(f"{who} failed:\n{traceback.format_exc().rstrip()}")
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(Exception):  # the user's own stream may have no flush()
                stream.flush()  # their output is shown before later output of distrain

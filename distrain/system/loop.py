"""The event loop of every program: one thread waits for file descriptors and timers. Runs in: anywhere.

:class:`PausableClock` is for timers that a person can stop.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from distrain.system.process import handled_signals

if TYPE_CHECKING:
    from types import FrameType

Callback = Callable[[], None]
_STUCK_AFTER = 3
"""Number of Ctrl-C without a step of the loop that raise KeyboardInterrupt."""
_NO_SIGNAL = b"\0"
_PAUSE_S = 0.5
"""Seconds that a timer is late if this process was paused."""


class Loop:
    """Call back when a descriptor can be read or written, and when a timer expires. It has no threads and never polls.

    Descriptors must be unregistered (:meth:`forget`) before they are closed.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._watched: dict[int, dict[int, Callback]] = {}
        """For each descriptor that the selector watches, what to call for which event."""
        self._timers: dict[str, tuple[float, Callback]] = {}
        self._on_signal: Callable[[int], None] = lambda number: None
        self._previous_wakeup_fd: int | None = None
        self._running = False
        self.is_stepping = False
        """True while callbacks are called."""
        self.now = time.monotonic()
        """Start of this step (time.monotonic). Judge the silence of others by it, not by the clock: a slow callback of
        this step kept this process from reading, and proves nothing about the others."""
        self._awake_since = self.now
        """End of the last pause of this process: SIGSTOP, Ctrl-Z, a suspended machine, or a slow callback."""
        self._posted: deque[Callback] = deque()
        self._lock = threading.RLock()  # a handler of a signal may post while its thread does
        self._is_woken = False
        self._wake_fds: tuple[int, ...] = os.pipe()
        for fd in self._wake_fds:
            os.set_blocking(fd, False)
        self.on_readable(self._wake_fds[0], self._on_wake)

    def on_readable(self, fd: int, callback: Callback | None) -> None:
        """Call ``callback`` whenever ``fd`` has data or is at its end; None stops that."""
        self._update(fd, selectors.EVENT_READ, callback)

    def on_writable(self, fd: int, callback: Callback | None) -> None:
        """Call ``callback`` whenever ``fd`` accepts data; None stops that."""
        self._update(fd, selectors.EVENT_WRITE, callback)

    def on_signals(self, numbers: Iterable[int], callback: Callable[[int], None]) -> dict[int, Any]:
        """Call back, in a step of the loop, with each of these signals that arrives. Return the previous handlers.

        Works in the main thread only. The interpreter's C handler writes to a pipe of the loop, because a handler in
        Python would run too late for a signal that arrives just before the loop sleeps. Ctrl-C three times, while the
        loop is stuck in a callback, raises KeyboardInterrupt.
        """
        interrupts, wanted = 0, frozenset(numbers)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._wake_fds[1], warn_on_full_buffer=False)

        def count_interrupts(number: int, frame: FrameType | None) -> None:
            nonlocal interrupts
            interrupts += number == signal.SIGINT
            if interrupts >= _STUCK_AFTER:
                raise KeyboardInterrupt

        def on_signal(number: int) -> None:
            nonlocal interrupts
            interrupts = 0
            if number in wanted:
                callback(number)

        self._on_signal = on_signal
        return {number: signal.signal(number, count_interrupts) for number in wanted}

    @contextlib.contextmanager
    def signals(self, numbers: Iterable[int], callback: Callable[[int], None]) -> Iterator[None]:
        """Call :meth:`on_signals` for the block. Another thread than the main one follows the :class:`SignalRelay`.

        Signals that this process ignores stay ignored. Signals with a handler in C keep it, because it could not be
        restored.
        """
        if threading.current_thread() is not threading.main_thread():
            relay = SignalRelay.current
            with contextlib.nullcontext() if relay is None else relay.followed_by(self, callback):
                yield
            return
        previous = self.on_signals((n for n in numbers if handler_of(n) not in (signal.SIG_IGN, None)), callback)
        _replaced.append(previous)
        try:
            yield
        finally:
            _replaced.pop()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def post(self, callback: Callback) -> None:
        """Call back in a step of the loop; never after :meth:`close`. Threads and handlers of signals may call this."""
        self._posted.append(callback)
        self._wake()

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # a pipe full of signals wakes the loop anyway
            if self._wake_fds and not self._is_woken:
                self._is_woken = True
                os.write(self._wake_fds[1], _NO_SIGNAL)

    def _on_wake(self) -> None:
        numbers = os.read(self._wake_fds[0], 4096)
        self._is_woken = False  # not before: a byte of a post meanwhile would be read, too, and the next one write none
        try:
            for number in numbers:
                self._on_signal(number)
            while self._posted:
                self._posted.popleft()()
        finally:
            if self._posted:  # after an exception, the others are called in the next step
                self._wake()

    def _update(self, fd: int, event: int, callback: Callback | None) -> None:
        watched = self._watched.get(fd, {})
        before = sum(watched)
        if callback is None:
            watched.pop(event, None)
        else:
            watched[event] = callback
        wanted = sum(watched)
        if not wanted:
            self.forget(fd)
        elif not before:
            self._selector.register(fd, wanted)
            self._watched[fd] = watched
        elif wanted != before:
            self._selector.modify(fd, wanted)

    def forget(self, fd: int) -> None:
        """Stop watching ``fd`` altogether; harmless if it was not watched."""
        if self._watched.pop(fd, None) is not None:
            self._selector.unregister(fd)

    def call_at(self, name: str, moment: float, callback: Callback) -> None:
        """Call once at ``moment`` (time.monotonic). A new timer of the same name replaces the old one."""
        self._timers[name] = (moment, callback)

    def call_in(self, name: str, delay_s: float, callback: Callback) -> None:
        """Call once, ``delay_s`` seconds from now."""
        self.call_at(name, time.monotonic() + delay_s, callback)

    def cancel(self, name: str) -> None:
        """Drop a timer; harmless if there is none of that name."""
        self._timers.pop(name, None)

    def run(self) -> None:
        """Wait and call back until :meth:`stop`."""
        self._running = True
        while self._running:
            self.step()

    def stop(self) -> None:
        """Make :meth:`run` return after the callbacks of this step."""
        self._running = False

    def silence_s(self, heard_at: float) -> float:
        """Return the seconds since ``heard_at`` (time.monotonic), or since the last pause of this process if shorter.

        The other processes may have paused together with this one, and get their full time again. A process notices
        only pauses that are longer than its timers.
        """
        return max(0.0, self.now - max(heard_at, self._awake_since))

    def step(self) -> None:
        """Wait for the next event or timer, and call back.

        Descriptors come before timers. If this process slept through a deadline, data that has arrived proves that its
        sender is alive before the timer of a lease can fire.
        """
        due = max(self.now, self._next_timer())
        ready = self._selector.select(None if due == math.inf else max(0.0, due - time.monotonic()))
        self.now = time.monotonic()
        if self.now > due + _PAUSE_S:
            self._awake_since = self.now
        due_now = [
            (key.fd, event, callback)
            for key, events in ready
            for event, callback in self._watched[key.fd].items()
            if events & event
        ]
        self.is_stepping = True
        try:
            for fd, event, callback in due_now:
                if self._watched.get(fd, {}).get(event) is callback:  # an earlier callback may have closed it
                    callback()
            self._fire_timers()
        finally:
            self.is_stepping = False

    def _next_timer(self) -> float:
        return min((moment for moment, _ in self._timers.values()), default=math.inf)

    def _fire_timers(self) -> None:
        now = time.monotonic()
        for name, (moment, callback) in list(self._timers.items()):
            if moment <= now and self._timers.get(name, (None,))[0] == moment:
                del self._timers[name]
                callback()

    def close(self) -> None:
        """Close the loop's own descriptors. Watched descriptors stay open, and signal handlers stay installed."""
        self._watched.clear()  # so that those who still watch one may forget it later
        self._selector.close()
        if self._previous_wakeup_fd is not None:
            signal.set_wakeup_fd(self._previous_wakeup_fd)
        with self._lock:
            for fd in self._wake_fds:
                os.close(fd)
            self._wake_fds = ()


_replaced: list[dict[int, Any]] = []
"""The handlers that :meth:`Loop.signals` has replaced."""


def _restore_handlers() -> None:
    """Let a child of ``os.fork()``, such as one of a callback, have the signals that it gets: it runs no loop."""
    if _replaced:
        signal.set_wakeup_fd(-1)
    while _replaced:
        for number, handler in _replaced.pop().items():
            signal.signal(number, handler)


os.register_at_fork(after_in_child=_restore_handlers)


class SignalRelay:
    """Signals that the main thread passes on to the loops of other threads, which the interpreter gives none.

    A loop that begins later gets the signals of earlier, too. There is one relay at a time.
    """

    current: ClassVar[SignalRelay | None] = None

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal may come while the handler of another one is in pass_on()
        self._passed: list[int] = []
        self._follow: set[Callable[[int], None]] = set()

    def __enter__(self) -> SignalRelay:
        SignalRelay.current = self
        return self

    def __exit__(self, *error: object) -> None:
        SignalRelay.current = None

    def pass_on(self, number: int) -> None:
        """Let every loop that follows call back with the signal."""
        with self._lock:
            self._passed.append(number)
            for follow in self._follow:
                follow(number)

    @contextlib.contextmanager
    def followed_by(self, loop: Loop, callback: Callable[[int], None]) -> Iterator[None]:
        """Call back with each signal, in steps of the loop, within the block."""

        def follow(number: int) -> None:
            loop.post(partial(callback, number))

        with self._lock:
            for number in self._passed:
                follow(number)
            self._follow.add(follow)
        try:
            yield
        finally:
            with self._lock:
                self._follow.remove(follow)


class PausableClock:
    """``time.monotonic()`` without the time for which this clock was paused."""

    def __init__(self) -> None:
        self._behind_s = 0.0
        self._paused_at: float | None = None

    @property
    def is_paused(self) -> bool:
        """True between :meth:`pause` and :meth:`resume`."""
        return self._paused_at is not None

    def now(self) -> float:
        """Return the time in seconds."""
        return (time.monotonic() if self._paused_at is None else self._paused_at) - self._behind_s

    def pause(self) -> None:
        """Stop the clock; harmless if it is paused."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def resume(self) -> None:
        """Let the clock continue from where it was paused; harmless if it is not paused."""
        if self._paused_at is not None:
            self._behind_s += time.monotonic() - self._paused_at
            self._paused_at = None

    def monotonic(self, moment: float | None) -> float | None:
        """Return when this clock shows ``moment`` (time.monotonic), or None for no moment and while it is paused."""
        if moment is None or self.is_paused:
            return None
        found = moment + self._behind_s
        return found if found - self._behind_s >= moment else math.nextafter(found, math.inf)  # it was rounded down


def handler_of(number: int) -> Any:
    """Return the handler of a signal, like ``signal.getsignal()``, or None for a handler in C.

    ``signal.getsignal()`` returns SIG_DFL for some handlers in C, such as that of ``faulthandler.register()``.
    """
    handler, (caught, _) = signal.getsignal(number), handled_signals(os.getpid()) or ((), ())
    return None if handler is signal.SIG_DFL and number in caught else handler

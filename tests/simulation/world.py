"""The world of a simulation: a clock that only events move, and processes whose threads are greenlets.

One random generator decides how long everything takes, and so in which order it happens. A process of the world holds
the tasks (threads) of a coordinator, an agent or a rank. A killed one is never resumed: no ``finally`` of it runs.
"""

from __future__ import annotations

import heapq
import itertools
import random
import select
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STARTED = 1_000.0
"""What time.monotonic() shows when a world begins."""
_BEGAN_AT = 1_700_000_000.0
"""What time.time() shows then."""
_PAUSE_S = 0.5
"""As in distrain.system.loop: seconds that a timer is late if its process was paused."""
_MOST_TURNS = 10_000
"""Turns of a loop at one moment, more than any run needs."""


class World:
    """One simulation. ``now`` is the time in seconds since an arbitrary moment, as time.monotonic() shows it."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)
        self.now = STARTED
        self.clock_error_s = 0.0
        """How much time.time() is ahead."""
        self.story: list[tuple[float, str]] = []
        """What has happened, for people: the moment and a sentence."""
        self.processes: list[Process] = []
        self.current: Task | None = None
        """The task that runs now; None in the hub."""
        self.is_over = False
        self.count = 0
        """Events so far."""
        self._hub = getcurrent()
        self._events: list[tuple[float, float, int, Process | None, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def wall(self) -> float:
        """Return what time.time() shows."""
        return _BEGAN_AT + self.now - STARTED + self.clock_error_s

    def monotonic(self) -> float:
        """Return what time.monotonic() shows."""
        return self.now

    def say(self, text: str) -> None:
        """Note that something has happened."""
        if not self.is_over:  # else a ``finally`` of a killed process speaks
            self.story.append((self.now - STARTED, text))

    def at(self, moment: float, do: Callable[[], None], process: Process | None = None) -> None:
        """Do something at a moment, unless the process has died by then. Equal moments have a random order."""
        entry = (max(moment, self.now), self.random.random(), next(self._numbers), process, do)
        heapq.heappush(self._events, entry)

    def after(self, seconds: float, do: Callable[[], None], process: Process | None = None) -> None:
        """Do something so many seconds from now."""
        self.at(self.now + seconds, do, process)

    def while_any(self, processes: Sequence[Process], until: float) -> None:
        """Let things happen until these processes have ended, or until a moment."""
        while self._events and any(one.is_alive for one in processes) and self._events[0][0] <= until:
            moment, _, _, process, do = heapq.heappop(self._events)
            self.now = max(self.now, moment)
            self.count += 1
            if process is None or process.is_alive:
                if process is not None and process.is_stopped:
                    process.held.append(do)
                else:
                    do()

    def wait(self, until: float | None = None) -> None:
        """Let the current task wait: until somebody wakes it, or until a moment."""
        if self.is_over or self.current is None:
            raise GreenletExit
        self.current.wait(until)

    def sleep(self, seconds: float) -> None:
        """Do what time.sleep() does."""
        until = self.now + max(0.0, seconds)
        while self.now < until:
            self.wait(until)

    def pause(self, most_s: float) -> None:
        """Let the current task take a moment, so that anything may happen in between."""
        if self.current is not None and not self.is_over:
            self.sleep(self.random.random() * most_s)

    def end(self) -> None:
        """End all tasks, also those of killed processes, so that nothing of them runs later."""
        self.is_over = True
        for process in self.processes:
            for task in process.tasks:
                task.discard()


class Process:
    """A process of the world."""

    def __init__(self, world: World, name: str, host: Any = None) -> None:
        self.world = world
        self.name, self.host = name, host
        self.is_alive = True
        self.is_stopped = False
        """True after SIGSTOP."""
        self.held: list[Callable[[], None]] = []
        """What had happened to it while it was stopped."""
        self.unread: list[Callable[[], None]] = []
        """The messages that had arrived meanwhile. As in the product, they are read before timers fire."""
        self.tasks: list[Task] = []
        self.at_death: list[Callable[[], None]] = []
        """What the kernel does when it ends: close files and connections."""
        self.error: BaseException | None = None
        """What its main task has raised."""
        world.processes.append(self)

    def start(self, run: Callable[[], Any], *, is_main: bool = False) -> Task:
        """Start a task. The process ends with its main task."""
        task = Task(self, run, is_main=is_main)
        self.tasks.append(task)
        self.world.at(self.world.now, task.begin, self)
        return task

    def kill(self) -> None:
        """End it as SIGKILL does."""
        if self.is_alive:
            self.is_alive = False
            for do in self.at_death:
                do()

    def stop(self) -> None:
        """Stop it as SIGSTOP does."""
        self.is_stopped = True

    def resume(self) -> None:
        """Continue it as SIGCONT does."""
        self.is_stopped = False
        held, self.held = self.held, []
        unread, self.unread = self.unread, []
        for post in unread:
            post()
        for number, do in enumerate(held):
            self.world.at(self.world.now + number * 1e-7, do, self)


class Task:
    """A thread of a process."""

    def __init__(self, process: Process, run: Callable[[], Any], *, is_main: bool) -> None:
        self.process = process
        self.is_alive = True
        self._run, self._is_main = run, is_main
        self._greenlet = greenlet(self._body, process.world._hub)
        self._waits_for = 0
        """The number of its wait; a wake-up for an earlier one does nothing."""
        self._waits = False
        self._raises: BaseException | None = None
        self.joined: list[Task] = []

    def _body(self) -> None:
        try:
            self._run()
        except GreenletExit:
            pass
        except BaseException as error:
            if self.process.world.is_over or not self.process.is_alive:
                return
            if not self._is_main:
                raise
            self.process.error = error
        finally:
            self.is_alive = False
            if not self.process.world.is_over:
                for other in self.joined:
                    other.wake()
        if self._is_main:
            self.process.kill()

    def begin(self) -> None:
        """Run it until it waits."""
        world = self.process.world
        before, world.current = world.current, self
        try:
            self._greenlet.switch()
        finally:
            world.current = before

    def wait(self, until: float | None) -> None:
        world = self.process.world
        self._waits_for += 1
        self._waits = True
        if until is not None:
            number = self._waits_for
            world.at(until, lambda: self._resume(number), self.process)
        if self._raises is None:
            world._hub.switch()
        self._waits = False
        if world.is_over:
            raise GreenletExit
        if self._raises is not None:
            error, self._raises = self._raises, None
            raise error

    def wake(self) -> None:
        """End its wait, in an event of its own."""
        number = self._waits_for
        if self._waits:
            self.process.world.at(self.process.world.now, lambda: self._resume(number), self.process)

    def interrupt(self, error: BaseException) -> None:
        """Raise an exception where it waits, as a signal handler would."""
        self._raises = error
        self.wake()

    def _resume(self, number: int) -> None:
        if self._waits and number == self._waits_for and self.is_alive:
            self.begin()

    def discard(self) -> None:
        if not self._greenlet.dead and self._greenlet:
            world = self.process.world
            world.current = self
            try:
                self._greenlet.throw(GreenletExit)
            except BaseException:  # of a finally block: the world is over
                pass
            finally:
                world.current = None


class SimulatedLoop(Loop):
    """The event loop of a process of the world: callbacks are posted to it, and its timers use the world's clock."""

    world: World

    def __init__(self) -> None:
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self._watched: dict[int, Any] = {}
        self._readable: set[int] = set()
        self._running = self.is_stepping = False
        self._turns = 0
        self.now = self._awake_since = self.world.now
        self._posted: deque[Callable[[], None]] = deque()
        self._task: Task | None = None
        self.on_signal: Callable[[int], None] = lambda number: None

    def post(self, callback: Callable[[], None]) -> None:
        """Have the callback called in the next step, as if a descriptor had become readable."""
        self._posted.append(callback)
        if self._task is not None:
            self._task.wake()

    def on_readable(self, fd: int, callback: Callable[[], None] | None) -> None:
        self._watched[fd] = callback

    def on_writable(self, fd: int, callback: Callable[[], None] | None) -> None:
        pass

    def look(self) -> None:
        """Have the callbacks of the descriptors called from which something can be read."""
        poll = select.poll()
        for fd in self._watched.keys() - self._readable:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(0):
            self._readable.add(fd)
            self.post(partial(self._read, fd))

    def _read(self, fd: int) -> None:
        self._readable.discard(fd)
        if callback := self._watched.get(fd):
            callback()

    def forget(self, fd: int) -> None:
        self._watched.pop(fd, None)

    def signals(self, numbers: Any, callback: Callable[[int], None]) -> Any:
        self.on_signal = callback
        return _Nothing()

    def step(self) -> None:
        self._task = self.world.current
        due = max(self.now, self._next_timer())
        while not self._posted and due > self.world.now:
            self.world.wait(None if due == float("inf") else due)
        self._turns = self._turns + 1 if self.world.now == self.now else 0
        if self._turns > _MOST_TURNS:
            raise RuntimeError("a loop turns without end, and without waiting")
        self.now = self.world.now
        if self.now > due + _PAUSE_S:
            self._awake_since = self.now
        posted, self._posted = self._posted, deque()
        self.is_stepping = True
        try:
            while posted:
                posted.popleft()()
            self._fire_timers()
        finally:
            self.is_stepping = False
            self._posted.extendleft(reversed(posted))  # after an exception

    def close(self) -> None:
        self._watched.clear()


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class SimulatedBackground:
    """Does one task after the other, each after a while, and reports each result some time later."""

    world: World
    _most_s = 0.02

    def __init__(self, loop: SimulatedLoop | None, name: str) -> None:
        self._loop = loop
        self._name = name
        self._work: deque[Any] = deque()
        self._is_busy = self._closed = False
        self.pending = 0

    def do(self, work: Callable[[], Any], then: Any = None, failed: Any = None) -> None:
        self.pending += 1
        if self._loop is None:
            self._end(then, failed, *_attempt(work))
            return
        self._work.append((work, then, failed))
        if not self._is_busy:
            self._is_busy = True
            assert self.world.current is not None
            self.world.current.process.start(self._serve)

    def _serve(self) -> None:
        while self._work and not self._closed:
            work, then, failed = self._work.popleft()
            self.world.pause(self._most_s)
            result, error = _attempt(work)
            self.world.pause(self._most_s / 4)
            self.report(lambda end=(then, failed, result, error): self._end(*end))
        self._is_busy = False

    def report(self, callback: Callable[[], None]) -> None:
        if self._loop is None:
            callback()
        elif not self._closed:
            self._loop.post(lambda: None if self._closed else callback())

    def close(self) -> None:
        self._closed = True
        self._work.clear()
        self.pending = 0

    def _end(self, then: Any, failed: Any, result: Any, error: BaseException | None) -> None:
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
    except GreenletExit:
        raise
    except BaseException as error:
        return None, error


# -- the module threading, for tasks ---------------------------------------------------------------------------------


class Threading:
    """What distrain uses of the module ``threading``, with tasks instead of threads."""

    TIMEOUT_MAX = threading.TIMEOUT_MAX
    Lock = threading.Lock
    BoundedSemaphore = threading.BoundedSemaphore  # there are never so many that one would wait
    current_thread, main_thread = staticmethod(threading.current_thread), staticmethod(threading.main_thread)

    def __init__(self, world: World) -> None:
        self.Thread = type("Thread", (_Thread,), {"world": world})
        self.Event = type("Event", (_Event,), {"world": world})
        self.RLock = type("RLock", (_RLock,), {"world": world})


class _Thread:
    world: World

    def __init__(self, target: Any = None, args: Sequence[Any] = (), name: str = "", daemon: bool = False) -> None:
        self._target, self._args = target, args
        self._task: Task | None = None

    def start(self) -> None:
        assert self.world.current is not None
        self._task = self.world.current.process.start(lambda: self._target(*self._args))

    def is_alive(self) -> bool:
        return self._task is not None and self._task.is_alive

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None and self.world.current is not None:
            self._task.joined.append(self.world.current)
            until = None if timeout is None else self.world.now + timeout
            while self._task.is_alive and (until is None or self.world.now < until):
                self.world.wait(until)


class _Event:
    world: World

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Task] = []

    def set(self) -> None:
        self._is_set = True
        for task in self._waiting:
            task.wake()

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else self.world.now + timeout
        while not self._is_set and (until is None or self.world.now < until):
            assert self.world.current is not None
            self._waiting.append(self.world.current)
            self.world.wait(until)
        return self._is_set


class _RLock:
    world: World

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True) -> bool:
        task = self.world.current
        while self._owner not in (None, task):
            if not blocking:
                return False
            assert task is not None
            self._waiting.append(task)
            self.world.wait()
        self._owner = task
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            waiting, self._waiting = self._waiting, []
            for task in waiting:
                task.wake()

    def _is_owned(self) -> bool:
        return self._owner is not None and self._owner is self.world.current

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

"""The user's process as a rank: its environment and session, what signals do, and its training.

Runs in: the user's process, in the thread that calls fit().
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from distrain import wire
from distrain.api import current
from distrain.coordinator.ranks.stop_signals import note_stop
from distrain.errors import DistrainError, LaunchError
from distrain.system import process
from distrain.system.loop import handler_of
from distrain.worker.profiler import begin_profile
from distrain.worker.session import Session
from distrain.worker.user_code import Terminated, run_rank, terminate
from distrain.worker.vitals import VitalsSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import FrameType

    from distrain.api.context import TrainContext
    from distrain.coordinator.ranks.rank_channel import RankChannel
    from distrain.system.loop import SignalRelay
    from distrain.worker.job.job import Work
    from distrain.worker.user_code import RankResult

_ONE_REQUEST_S = 1.0
"""Seconds in which several signals are one request: a terminal and another launcher may both pass a Ctrl-C on."""
_training_here = threading.RLock()


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Raise LaunchError if another thread trains in this process."""
    if not _training_here.acquire(blocking=False):
        raise LaunchError("another thread is already training in this process; run them in turn, or use num_workers=1")
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


@dataclass(eq=False)
class Signals:
    """The handling of signals in a process that is a rank, except those for which the user has a handler. A context.

    While train_func runs, the first one asks the whole run to stop. Unless train_func calls should_stop(), it ends it
    by an exception, too; and so does a later one. When rank 0 does not train, the run gets them (``relay``).

    is_alone: there are no other ranks that have to know at once. So train_func, or pdb, may catch a KeyboardInterrupt.
    """

    numbers: Sequence[int]
    channel: RankChannel
    relay: SignalRelay | None
    is_alone: bool = False
    _pid: int = field(default_factory=os.getpid)
    _replaced: dict[int, Any] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _is_training: bool = False
    _asked_at: float | None = None
    """When the first signal came (time.monotonic)."""
    _has_told: bool = False
    """True once the run knows of it."""
    _ordered: int | None = None
    """The signal by which the run ends train_func."""
    _has_raised: bool = False
    """True once a signal has ended train_func by an exception."""
    _is_over: bool = False
    """True once train_func has ended."""

    def __enter__(self) -> None:
        usual = {**dict.fromkeys(self.numbers, signal.SIG_DFL), signal.SIGINT: signal.default_int_handler}
        is_main = threading.current_thread() is threading.main_thread()
        self._replaced = {n: handler for n, handler in usual.items() if is_main and handler_of(n) is handler}
        if is_main and self.relay is not None:
            self._stack.enter_context(self.relay)
        for number in self._replaced:
            signal.signal(number, self._on_signal)

    def __exit__(self, *error: object) -> None:
        replaced, self._replaced = self._replaced, {}
        for number, handler in replaced.items():
            signal.signal(number, handler)
        self._stack.close()

    def begin_training(self) -> None:
        """Note that train_func begins."""
        self._is_over, self._is_training = False, True

    def end_training(self) -> None:
        """Note that train_func has ended: no signal may interrupt what follows."""
        self._is_training, self._is_over, self._ordered = False, True, None

    def order(self, name: str) -> None:
        """End train_func by this signal because the run has to stop. Called in another thread."""
        number = signal.Signals[name]
        if number in self._replaced and not self._is_over:
            self._ordered = number
            process.kill(os.getpid(), number)

    def raise_ordered(self) -> None:
        """Raise the exception for a signal by which the run has ended train_func before it began."""
        if self._ordered is not None:
            self._raise(self._ordered, None)

    def note_stop(self, error: BaseException | None) -> None:
        """Ask the run to stop if train_func was ended by the exception of a signal, whoever has raised it."""
        if isinstance(error, (KeyboardInterrupt, Terminated)) and not self._has_told:
            self._tell(error.number if isinstance(error, Terminated) else signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a child of train_func: its connection is closed
            self._raise(number, frame)
        if number == self._ordered:
            if self._is_training and not self._has_raised:
                self._raise(number, frame)
        elif self._is_training or self.relay is None:
            if not self._takes(number):
                self._raise(number, frame)
        else:
            note_stop(signal.Signals(number).name)
            self.relay.pass_on(number)

    def _takes(self, number: int) -> bool:
        """Return whether train_func continues after this signal."""
        note_stop(signal.Signals(number).name)
        if self._asked_at is not None:
            return not self.is_alone and time.monotonic() < self._asked_at + _ONE_REQUEST_S
        self._asked_at = time.monotonic()
        if self.channel.uses_should_stop or not self.is_alone:
            self._tell(number)
        return self.channel.uses_should_stop

    def _tell(self, number: int) -> None:
        self._has_told = True
        with contextlib.suppress(DistrainError):
            self.channel.send(wire.HostSignalled(signal=signal.Signals(number).name, is_own=self.is_alone))

    def _raise(self, number: int, frame: FrameType | None) -> NoReturn:
        self._has_raised = True
        if number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        terminate(number, frame)


@dataclass(eq=False)
class OwnRank:
    """The part of a rank for this process: it trains, in the thread that calls fit(), whenever the run orders it.

    around: a context for each attempt. fresh: makes the work of an attempt. leave: leaves the framework's group.
    error: the exception that has ended train_func in the latest attempt.
    """

    channel: RankChannel
    signals: Signals
    fresh: Callable[[], Work]
    around: Callable[[wire.WorkerSpec], AbstractContextManager[object]]
    leave: Callable[[RankResult, TrainContext], None]
    error: BaseException | None = None
    executed: RankResult | None = None
    """The end of the latest attempt."""

    def serve(self) -> None:
        """Train as often as the run orders it. Return when the run has ended."""
        while (spec := self.channel.await_spec()) is not None:
            with self.around(spec):
                session = Session.of(self.channel, spec)
                session.hooks["profile"] = partial(begin_profile, session)
                self.channel.use_storage(session.context.get_storage().run)
                self._be_rank(session, spec.vitals_s)

    def give_up(self, error: BaseException) -> None:
        """End the run because this process cannot be a rank."""
        with contextlib.suppress(DistrainError):
            self.channel.send(wire.HostFailed(text=f"this process can no longer be a rank: {error!r}"))

    def _be_rank(self, session: Session, vitals_s: float) -> None:
        work = self.fresh()

        def load() -> Work:
            self.signals.raise_ordered()
            return work

        is_alone = session.context.get_world_size() == 1
        sampler = contextlib.nullcontext() if is_alone else VitalsSampler(session, vitals_s)
        with current_session(session):
            self.signals.begin_training()
            self.executed = executed = run_rank(
                load, session, observed=sampler, ended=lambda error: self.signals.end_training()
            )
            self.error = executed.error
            self.signals.note_stop(executed.error)
            with contextlib.suppress(DistrainError):
                self.channel.send(executed.outcome)
                if executed.outcome.ok:
                    self.channel.uses_should_stop = True  # a signal is for the other ranks now
                    session.wait_for_release()
                    session.wait_for_commits()
            self.leave(executed, session.context)

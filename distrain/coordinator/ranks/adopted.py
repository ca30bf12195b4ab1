"""Ranks that distrain has not started, to which this module is what an agent is to workers. Runs in: coordinator.

It answers the orders of the run for all their hosts. It starts and ends no process: a rank is there, and waits for its
:class:`~distrain.wire.WorkerSpec`; if it has to end, it learns that by :class:`~distrain.wire.RunEnded`. Each rank has
a connection to this module, also rank 0, which is in this process; its other end is in
:mod:`distrain.coordinator.ranks.rank_channel`.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.connection.worker_settings import RENDEZVOUS_VARIABLES
from distrain.coordinator.ranks.rank_channel import SocketChannel
from distrain.coordinator.ranks.this_process import only_one
from distrain.hosts.host_info import hello_of, host_info
from distrain.hosts.network import reserve_port
from distrain.system import process

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distrain.coordinator.ranks.this_process import OwnRank
    from distrain.decisions.events import HostLost, RunRequest
    from distrain.hosts.world import WorldPlan
    from distrain.system.loop import Loop

_STACKS_S = 1.0
"""Seconds to wait for the stacks of ranks that continue."""
_LAST_STACKS_S = 0.3
"""Seconds to wait for the stacks of ranks that have to end."""
_CULPRIT_S = 2.0
"""Seconds to wait for the rank that has failed first, after others have failed because of it."""
_LOST = "its process has ended without an outcome: it was killed, or its host is lost"
_NO_DEBUGGER = "the debugger opens only in ranks that distrain has started; call breakpoint() in train_func instead"


@dataclass(eq=False)
class AdoptedRanks:
    """See :class:`~distrain.coordinator.ranks.port.Ranks`.

    connections: the ends of this module, by rank.
    own: the rank in this process, which is rank 0.
    port: that of the rendezvous if the ranks have met already.
    """

    connections: Mapping[int, socket.socket]
    own: OwnRank
    with_gpus: bool = False
    port: int | None = None

    def __post_init__(self) -> None:
        self._channels = {rank: SocketChannel(connection) for rank, connection in self.connections.items()}
        self._reserved = ExitStack()
        self._attempt = -1
        self._prepared: dict[str, str] = {}
        self._loop: Loop
        self._on_message: Callable[[str, wire.Message], None]
        self._said: deque[tuple[str, wire.Message]] = deque()
        """Messages that the run has not heard yet, by host."""
        self._hosts: dict[int, str] = {}
        """The host of each rank of the attempt."""
        self._working: set[int] = set()
        """The ranks that have not ended their work."""
        self._alive: set[int] = set()
        """The ranks that may still send something, as far as the run knows."""
        self._alive_on: Counter[str] = Counter()
        """The number of those on each host."""
        self._asked: dict[str, None] = {}
        """The hosts that have to say which of their ranks are silent."""
        self._silent: set[int] = set()
        """The ranks that were asked for their stacks and have not answered."""
        self._stop: wire.Stop | None = None
        self._is_ending = False
        """True while the last stacks are taken."""
        self._failures: list[tuple[bool, int, str]] = []
        """The ranks that have failed: whether another one may be to blame, the rank, and how."""

    @property
    def errors(self) -> Mapping[int, BaseException]:
        return {} if self.own.error is None else {0: self.own.error}

    def drive(self, run: Callable[[], None]) -> None:
        """Run in a thread, and be rank 0 in this one. Raise LaunchError if another thread trains in this process."""
        errors: list[BaseException] = []

        def drive() -> None:
            try:
                run()
            except BaseException as error:
                errors.append(error)
            finally:
                self._channels.pop(0).close()

        thread = threading.Thread(target=drive, name="distrain-run", daemon=True)
        try:
            with only_one(), self.own.signals:
                thread.start()
                try:
                    self.own.serve()
                except BaseException as error:  # the run would wait for this rank
                    self.own.give_up(error)
                    raise
                finally:
                    thread.join()
        finally:
            self.own.channel.close()
            if channel := self._channels.pop(0, None):  # the thread was not started
                channel.close()
        if errors:
            raise errors[0]

    def open(
        self, loop: Loop, on_message: Callable[[str, wire.Message], None], on_lost: Callable[[HostLost], None]
    ) -> None:
        self._loop, self._on_message = loop, on_message
        for rank, channel in self._channels.items():
            channel.attach(loop, partial(self._on_frames, rank))

    def connect(self, name: str) -> None:
        self._say(name, hello_of(host_info(with_gpus=self.with_gpus)))

    def stream_argv(self, name: str) -> list[str]:
        return process.bootstrap_argv("stream-server")  # their hosts share all files with this machine

    def close(self, *, keep: bool) -> None:
        for timer in ("said", "rank_stacks", "rank_ends"):
            self._loop.cancel(timer)
        for channel in self._channels.values():
            channel.detach()
        self._reserved.close()

    # -- what the run hears ---------------------------------------------------------------------------------------

    def _say(self, host: str, message: wire.Message) -> None:
        """Let the run hear a message in the next step of the loop, after those that were said before."""
        self._said.append((host, message))
        self._loop.call_in("said", 0.0, self._deliver)

    def _deliver(self) -> None:
        self._loop.cancel("said")
        while self._said:
            self._on_message(*self._said.popleft())

    # -- orders of the run ----------------------------------------------------------------------------------------

    def send(self, name: str, message: wire.Message) -> None:
        match message:
            case wire.Prepare(environment=environment):
                self._prepared = dict(environment)
            case wire.ReservePort(attempt=attempt):
                self._say(name, wire.RendezvousPort(attempt=attempt, port=self._reserve_port()))
            case wire.Start():
                self._start(name, message)
            case wire.TakeStacks() if not self._is_ending:
                self._take_stacks([name], _STACKS_S)
            case wire.Stop():
                self._stop_ranks(name, message)
            case wire.Ask(attempt=attempt, rank=rank, what="debug"):
                self._say(name, wire.DebuggerSays(attempt=attempt, rank=rank, closed=_NO_DEBUGGER))
            case wire.Release(rank=rank):
                self._queue(rank, message)
                self._exit(rank, exit_code=0)
            case wire.ToWorker(rank=rank) | wire.Upload(rank=rank):
                self._queue(rank, message)

    def _queue(self, rank: int, message: wire.Message) -> None:
        if rank in self._channels:
            self._channels[rank].queue(message)

    def _reserve_port(self) -> int:
        if self.port is not None:
            return self.port
        self._reserved.close()
        return int(self._reserved.enter_context(reserve_port()).getsockname()[1])

    def _start(self, host: str, start: wire.Start) -> None:
        if start.attempt != self._attempt:
            self._attempt, self._stop, self._is_ending = start.attempt, None, False
            self._hosts, self._working, self._alive, self._failures = {}, set(), set(), []
            self._alive_on.clear()
        for fields in start.ranks:
            spec = wire.WorkerSpec(**{**fields, "environment": {**self._prepared, **fields["environment"]}})
            rank = spec.rank
            self._hosts[rank] = host
            self._working.add(rank)
            self._alive.add(rank)
            self._alive_on[host] += 1
            if self._channels[rank].at_end:
                self._lose(rank)
            else:
                self._queue(rank, spec)

    # -- what the ranks say ---------------------------------------------------------------------------------------

    def _on_frames(self, rank: int, frames: Sequence[wire.Frame]) -> None:
        for frame in frames:
            if rank in self._alive:
                self._on_rank(rank, frame.message())
        if not frames and rank in self._alive:
            self._lose(rank)
        self._deliver()

    def _lose(self, rank: int) -> None:
        self._end_work(rank)
        self._exit(rank, lost=_LOST)
        self._note_failure(rank, f"was lost: {_LOST}", is_consequence=False)

    def _on_rank(self, rank: int, message: wire.Message) -> None:
        self._say(self._hosts[rank], message)
        match message:
            case wire.Dump(what="stacks"):
                self._note_stacks(rank)
            case wire.Outcome():
                self._end_work(rank)
                if not message.ok:
                    self._note_failure(rank, f"has failed: {message.error}", is_consequence=message.blames_peer)
                    self._exit(rank, exit_code=message.exit_code)
                elif self._stop is not None:
                    self._exit(rank, exit_code=0)

    def _note_failure(self, rank: int, how: str, *, is_consequence: bool) -> None:
        self._failures.append((is_consequence, rank, f"rank {rank} on {self._hosts[rank]} {how}"))
        if not is_consequence and self._stop is not None and not (self._stop.grace_s or self._is_ending):
            self._take_last_stacks()

    def _end_work(self, rank: int) -> None:
        self._working.discard(rank)
        self._note_stacks(rank)

    def _exit(self, rank: int, *, exit_code: int | None = None, lost: str | None = None, by_us: bool = False) -> None:
        """Tell the run that a rank has ended, and with the last one that its host is idle."""
        host = self._hosts[rank]
        if rank not in self._alive:
            return
        self._alive.discard(rank)
        self._alive_on[host] -= 1
        self._say(host, wire.Exited(attempt=self._attempt, rank=rank, exit_code=exit_code, lost=lost, by_us=by_us))
        if not self._alive_on[host]:
            self._say(host, wire.HostIdle(attempt=self._attempt))

    # -- stacks ---------------------------------------------------------------------------------------------------

    def _take_stacks(self, hosts: Iterable[str], timeout_s: float) -> None:
        self._asked |= dict.fromkeys(hosts)
        for rank in [rank for rank in sorted(self._working) if self._hosts[rank] in self._asked]:
            self._silent.add(rank)
            self._queue(rank, wire.TakeStacks(attempt=self._attempt))
        self._loop.call_in("rank_stacks", timeout_s if self._silent else 0.0, self._end_stacks)

    def _note_stacks(self, rank: int) -> None:
        self._silent.discard(rank)
        if self._asked and not self._silent:
            self._end_stacks()

    def _end_stacks(self) -> None:
        self._loop.cancel("rank_stacks")
        for host in self._asked:
            silent = sorted(rank for rank in self._silent if self._hosts[rank] == host)
            self._say(host, wire.StacksDone(attempt=self._attempt, silent=silent))
        self._asked, self._silent = {}, set()
        if self._is_ending:
            self._end_ranks()

    # -- stopping -------------------------------------------------------------------------------------------------

    def _stop_ranks(self, host: str, stop: wire.Stop) -> None:
        """End the attempt: a signal, a grace, stacks, and then the news that the run has failed."""
        has_started = stop.attempt == self._attempt
        if has_started and stop is not self._stop:  # all hosts get the same one
            self._begin_to_stop(stop)
        if not (has_started and self._alive_on[host]):
            self._say(host, wire.HostIdle(attempt=stop.attempt))

    def _begin_to_stop(self, stop: wire.Stop) -> None:
        self._stop, self._is_ending = stop, False
        for rank in sorted(self._alive - self._working):
            self._exit(rank, exit_code=0)
        if not self._working:
            return
        if stop.grace_s:
            for rank in self._working:
                self._queue(rank, stop)
            self._loop.call_in("rank_ends", stop.grace_s, self._take_last_stacks)
        elif stop.culprit_known or not all(is_consequence for is_consequence, _, _ in self._failures):
            self._take_last_stacks()
        else:
            self._loop.call_in("rank_ends", _CULPRIT_S, self._take_last_stacks)

    def _take_last_stacks(self) -> None:
        self._loop.cancel("rank_ends")
        self._is_ending = True
        self._take_stacks(self._hosts.values(), _LAST_STACKS_S)

    def _end_ranks(self) -> None:
        """Tell the ranks that are still at work that the run has failed. To the run, they have ended by that."""
        self._is_ending = False
        culprit, text = self._why()
        for rank in sorted(self._working):
            self._queue(rank, wire.RunEnded(attempt=self._attempt, rank=rank, text=text, culprit=culprit))
            self._exit(rank, by_us=True)
        self._working.clear()

    def _why(self) -> tuple[int | None, str]:
        """Return what the other ranks hear: which rank is to blame, if any, and the text."""
        assert self._stop is not None
        if self._stop.problem:
            return None, self._stop.problem
        _, culprit, text = min(self._failures, key=itemgetter(0), default=(False, 0, "the run has ended"))
        return culprit, f"the run was stopped by {self._stop.reason}" if self._stop.reason else text


def request_for_adopted(request: RunRequest, plan: WorldPlan | None = None) -> RunRequest:
    """Return what the user has asked for, as far as it makes sense for ranks that distrain has not started.

    plan: where the ranks are; without one, this process is the only one, and may train again after a failure.
    """
    [settings] = request.hosts.values()
    own = {name: value for name, value in settings.environment.items() if name not in RENDEZVOUS_VARIABLES}
    settings = replace(settings, environment=own)
    scaling = replace(request.scaling, num_workers=1 if plan is None else plan.world_size, grow=None)
    hosts = request.hosts.keys() if plan is None else plan.hosts
    return replace(
        request,
        scaling=scaling,
        failure_config=replace(
            request.failure_config,
            hang_timeout_s=None,
            max_failures=0 if plan else request.failure_config.max_failures,
            on_nan="ignore" if plan else request.failure_config.on_nan,
        ),
        hosts={host: replace(settings, slots=len(plan.on(host)) if plan else None) for host in hosts},
        debug_rank=None,
        plan=plan,
        keeps_logs=False,
    )

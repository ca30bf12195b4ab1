"""The run of ranks that another launcher has started: a thread of rank 0, where train_func has the main thread.

The ranks, rank 0 too, send it the messages that workers send to a coordinator. It keeps their reports, commits their
checkpoints, and answers. It neither starts nor ends processes. Runs in: coordinator (a thread of rank 0).
"""

from __future__ import annotations

import select
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.api.observer import AttemptBegan
from distrain.coordinator.launched.rank_channel import SocketChannel
from distrain.coordinator.report_handler import ReportHandler
from distrain.coordinator.validations import WAITING, Validations
from distrain.decisions.blame import RunSummary, culprit_first, failure_of
from distrain.decisions.states import RunState
from distrain.decisions.stop_consensus import StopConsensus
from distrain.errors import RankFailure
from distrain.system.background import Background
from distrain.system.log import say
from distrain.system.loop import Loop

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from distrain.api.config import CheckpointConfig
    from distrain.coordinator.observers import Observers
    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.events import RunRequest
    from distrain.decisions.stop_consensus import StopOrder

_STORING_S = 5.0
"""Seconds for which ranks may complete a checkpoint after another rank has failed."""
_CULPRIT_S = 2.0
"""Seconds to wait for the rank that has failed first, after others have failed because of it."""
_FAREWELL_S = 1.0
"""Seconds without progress for which ranks may take the end of the run from rank 0, which may exit then."""


class RankServer:
    """The ranks of one attempt. :meth:`join` returns when the attempt is over, and everything is written.

    hosts: the host of each rank. connections: the server's ends, by rank.
    """

    def __init__(
        self,
        request: RunRequest,
        store: RunStore,
        checkpoint_config: CheckpointConfig,
        observers: Observers,
        *,
        hosts: Sequence[str],
        connections: Mapping[int, socket.socket],
    ) -> None:
        self.failures: list[RankFailure] = []
        """The failures of ranks, as they arrived."""
        self._request = request
        self._store = store
        self._observers = observers
        self._hosts = hosts
        self._loop = Loop()
        self._files = Background(self._loop, "files")
        self._channels = {rank: SocketChannel(connection) for rank, connection in connections.items()}
        self._stops = StopConsensus()
        self._validations = Validations(request, store)
        self._report_handler = ReportHandler(
            store,
            checkpoint_config,
            observers,
            send=self._send,
            upload=lambda order: self._channels[order.rank].queue(order),
            on_commit=lambda path: None,
            validations=self._validations,
        )
        self._outcomes: dict[int, wire.Outcome] = {}
        self._gone: set[int] = set()
        """Ranks that have ended, with an outcome or without."""
        self._stop_reason: str | None = None
        self._problem: str | None = None
        """Why the run directory cannot be written."""
        self._failed_at: float | None = None
        """When the first rank failed (time.monotonic)."""
        self._has_told = False
        """True once the ranks know that the run has failed."""
        self._is_abandoned = False
        """True if rank 0 waits no longer, as another signal asks it to end."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="distrain-ranks", daemon=True)

    # -- in the main thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve the ranks in a thread."""
        self._store.on_failure = self._storage_failed
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the attempt."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Let :meth:`join` return soon."""

        def note() -> None:
            self._is_abandoned = True

        self._files.report(note)

    def close(self) -> None:
        """Release everything but the connections. Called after :meth:`join`, or when that was interrupted."""
        if self._thread.is_alive():
            self.abandon()
            self._thread.join()
        self._store.detach()
        self._files.close()
        for channel in self._channels.values():
            channel.detach()
        self._loop.close()

    def say_goodbye(self, end: bytes) -> None:
        """Send the end of the run to the other ranks, and close the connections."""
        self._channels.pop(0).close()
        for rank, channel in self._channels.items():
            channel.queue(wire.RunEnded(attempt=self._request.first_attempt, rank=rank, body=end))
        deadline, unsent = time.monotonic() + _FAREWELL_S, 0
        while (waits := self._still_reading()) and time.monotonic() < deadline:
            poll = select.poll()
            for channel in waits:
                poll.register(channel.read_fd, select.POLLIN | (select.POLLOUT if channel.queued_bytes else 0))
            poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            for channel in waits:
                channel.flush()
                channel.drain()
            before, unsent = unsent, sum(channel.queued_bytes for channel in waits)
            if unsent != before:  # a large return value is on its way
                deadline = time.monotonic() + _FAREWELL_S
        for channel in self._channels.values():
            channel.close()

    def _still_reading(self) -> list[SocketChannel]:
        """Return the connections to wait for. To close one that has unread bytes would destroy what was sent there."""
        has_failed = bool(self.failures or self._problem)
        return [c for c in self._channels.values() if not c.at_end and (c.queued_bytes or has_failed)]

    @property
    def metrics(self) -> dict[str, Any] | None:
        """The metrics of rank 0's last report."""
        return self._report_handler.metrics

    def summary(self, own_error: BaseException | None) -> RunSummary:
        """Return how the attempt has ended. ``own_error``: what train_func has raised on rank 0."""
        done = [rank for rank, outcome in self._outcomes.items() if outcome.ok]
        has_stopped = any(outcome.stopped for outcome in self._outcomes.values())
        is_finished = len(done) == len(self._hosts) and not has_stopped
        state = RunState.FINISHED if is_finished else RunState.ABORTED if self._stop_reason else RunState.FAILED
        value = self._outcomes[0].body if len(done) == len(self._hosts) else None
        return RunSummary(
            state=RunState.FAILED if self._problem else state,
            attempt=self._request.first_attempt,
            value=value,
            failures=[] if self._problem else [failure for failure in self.failures if not self._is_stop(failure)],
            errors={} if own_error is None else {0: own_error},
            stop_reason=None if is_finished or self._problem else self._stop_reason,
            problem=self._problem,
            storage_failed=self._problem is not None,
            hosts=self._hosts,
            finished=done,
            entered=True,
        )

    def _is_stop(self, failure: RankFailure) -> bool:
        """Return True if Ctrl-C has ended the rank."""
        return self._stop_reason == "SIGINT" and failure.summary.startswith("KeyboardInterrupt")

    # -- the loop -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._store.start(self._loop, self._files, self._request.run_id, self._request.python_flags)
            self._observers.tell(AttemptBegan(self._request.first_attempt, self._hosts, time.monotonic()))
            self._report_handler.begin(self._request.first_attempt, len(self._hosts))
            self._validations.start(self._loop)
            for rank, channel in self._channels.items():
                channel.attach(self._loop, partial(self._on_frames, rank))
            while not self._is_over():
                self._step()
            self._finish()
        except BaseException as error:
            self._error = error
            for channel in self._channels.values():
                channel.close()  # the ranks wait for answers

    def _step(self) -> None:
        for name, moment, callback in (
            ("report_handler", self._report_handler.deadline(), self._report_handler.tick),
            ("validations", self._validations.deadline(), self._validations.tick),
            ("stops", self._stops.deadline, self._tick_stops),
            ("failure", self._failure_deadline(), lambda: None),
        ):
            if moment is None:
                self._loop.cancel(name)
            else:
                self._loop.call_at(name, moment, callback)
        self._loop.step()
        self._report_handler.flush()
        self._tell_of_failure()

    def _is_over(self) -> bool:
        """Return whether rank 0 need not wait for other ranks any more."""
        all_are_gone = len(self._gone) == len(self._hosts)
        return all_are_gone or self._is_abandoned or (self._has_told and 0 in self._gone)

    def _finish(self) -> None:
        """Wait until all is written, and then release the ranks."""
        self._report_handler.end()
        self._wait_until(lambda: self._store.is_idle)
        if not self.failures and not self._problem and len(self._outcomes) == len(self._hosts):
            self._await_validations()
        self._validations.abort()
        self._report_handler.close()
        self._wait_until(lambda: self._store.is_idle)
        if not self._store.is_idle:
            self._store.abandon_pending_work()
        if not self.failures:
            for rank in self._channels:
                self._send(wire.Release(attempt=self._request.first_attempt, rank=rank))

    def _await_validations(self) -> None:
        if self._validations.busy and not any(outcome.stopped for outcome in self._outcomes.values()):
            say(WAITING)
            self._wait_until(lambda: not self._validations.busy)
            if self._validations.busy:
                self._validations.give_up("a signal has ended the wait for it")

    def _wait_until(self, done: Callable[[], bool]) -> None:
        while not (done() or self._is_abandoned):
            self._step()

    # -- messages of ranks ----------------------------------------------------------------------------------------

    def _on_frames(self, rank: int, frames: Sequence[wire.Frame]) -> None:
        for frame in frames:
            message = frame.message()
            assert isinstance(message, wire.FromWorker)
            self._on_message(message)
        if not frames and rank not in self._gone:
            self._on_lost(rank)

    def _on_message(self, message: wire.FromWorker) -> None:
        match message:
            case wire.StopVote(reason=str(reason)) if reason:
                if self._stop_reason is None and self._failed_at is None:
                    self._stop_reason = reason
                    self._send_stop_orders(self._stops.request_stop())
            case wire.StopVote(rank=rank, call=call):
                self._send_stop_orders(self._stops.vote(rank, call, time.monotonic()))
            case wire.Outcome():
                self._on_outcome(message)
            case _:
                self._report_handler.handle(message)

    def _on_outcome(self, outcome: wire.Outcome) -> None:
        rank = outcome.rank
        self._outcomes[rank] = outcome
        self._report_handler.handle(outcome)
        failure = failure_of(rank, self._hosts[rank], len(self.failures) + 1, outcome=outcome, exited=None)
        self._end_rank(rank, replace(failure, consequence=True) if failure and self._has_told else failure)

    def _on_lost(self, rank: int) -> None:
        self._report_handler.rank_ended(rank)
        lost = RankFailure(
            rank=rank,
            host=self._hosts[rank],
            order=len(self.failures) + 1,
            summary="its process has ended without an outcome: it was killed, or its host is lost",
            traceback="",
            exit_code=1,
            consequence=False,
            kind="lost",
        )
        self._end_rank(rank, lost)

    def _end_rank(self, rank: int, failure: RankFailure | None) -> None:
        self._gone.add(rank)
        self._send_stop_orders(self._stops.mark_finished(rank))
        if failure is not None:
            self.failures.append(failure)
            self._failed_at = self._failed_at or time.monotonic()

    # -- failures -------------------------------------------------------------------------------------------------

    def _failure_deadline(self) -> float | None:
        if self._failed_at is None or self._has_told:
            return None
        known = not all(failure.consequence for failure in self.failures)
        return self._failed_at + (_STORING_S if known else _CULPRIT_S)

    def _tell_of_failure(self) -> None:
        """Tell the ranks of the first failure, once it is known and no checkpoint can be completed any more."""
        deadline = self._failure_deadline()
        if deadline is None:
            return
        culprit = culprit_first(self.failures)[0]
        if time.monotonic() < deadline:
            progress = self._report_handler.storing({failure.rank for failure in self.failures})
            if culprit.consequence or progress.parts or progress.expected:
                return
        failed = f"rank {culprit.rank} on {culprit.host} has failed: {culprit.summary}"
        self._tell(f"the run was stopped by {self._stop_reason}" if self._stop_reason else failed, culprit.rank)

    def _storage_failed(self, why: str) -> None:
        if self._problem is None:
            self._problem = why
            self._tell(why, None)

    def _tell(self, text: str, culprit: int | None) -> None:
        self._has_told = True
        for rank in self._channels:
            failed = wire.RunFailed(attempt=self._request.first_attempt, rank=rank, text=text, culprit=culprit)
            self._send(failed)

    # -- stops ----------------------------------------------------------------------------------------------------

    def _tick_stops(self) -> None:
        self._send_stop_orders(self._stops.tick(time.monotonic()))

    def _send_stop_orders(self, orders: Sequence[StopOrder]) -> None:
        attempt = self._request.first_attempt
        for order in orders:
            for rank in order.ranks:
                self._send(wire.StopDecision(attempt=attempt, rank=rank, call=order.call, final=order.final))

    def _send(self, message: wire.ToWorker) -> None:
        self._channels[message.rank].queue(message)

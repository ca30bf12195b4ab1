"""The loop in the user's process: hears the hosts, feeds the machine, does what it asks for. Runs in: coordinator.

What hosts say goes to the machine, which decides, to the ledger, which keeps what ranks report, or to the watch over
their progress; the connections, the outputs and the checks of a launch have modules of their own, too.
The loop runs in the thread that called fit(), without asyncio, so it works in notebooks. It is event-driven: it sleeps
until a descriptor is ready or a deadline comes. It never waits for a disk, a callback of the user's or a console: those
have threads of their own (:mod:`distrain.system.background`, :mod:`distrain.system.consoles`).
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from typing import TYPE_CHECKING

from distrain import wire
from distrain.coordinator.connections import Connections
from distrain.coordinator.hang_monitor import HangMonitor
from distrain.coordinator.launch_checks import CheckedLaunch
from distrain.coordinator.preemption import STOP_SIGNALS, note_stop
from distrain.coordinator.report_handler import ReportHandler
from distrain.coordinator.validations import WAITING, Validations
from distrain.coordinator.worker_output import RankOutputs
from distrain.decisions import events
from distrain.decisions.run_machine import RunStateMachine
from distrain.decisions.stack_summary import last_words, native_reason
from distrain.decisions.states import RunState
from distrain.system.background import Background
from distrain.system.log import say, warn, warn_once
from distrain.system.loop import Loop
from distrain.work.job import original

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from distrain.config import CheckpointConfig
    from distrain.coordinator.callbacks import Callbacks
    from distrain.coordinator.manifest import RunManifest
    from distrain.coordinator.transport import Transport
    from distrain.decisions.events import RunRequest
    from distrain.storage.run_store import RunStore

_SILENT_WAIT_S = 5.0
"""Seconds of waiting for the storage or for callbacks before the user is told."""
_LEAST_WAIT_S = 1.0
"""Seconds that the end of a run waits for the storage and for callbacks, also if the user is impatient."""
_SETTLE_S = 0.05
"""How long the end of an attempt waits, again and again, for checkpoints that uploaders are bringing."""
_UPLOAD_PATIENCE_S = 300.0


class Coordinator:
    """One run. After :meth:`run`, ``end`` tells how it ended."""

    def __init__(
        self,
        request: RunRequest,
        store: RunStore,
        transports: Sequence[Transport],
        checkpoint_config: CheckpointConfig,
        *,
        log_dir: Path | None = None,
        stale_run_id: str | None = None,
        manifest: RunManifest,
        callbacks: Callbacks | None = None,
        console_ranks: Collection[int] | None = None,
    ) -> None:
        self.machine = RunStateMachine(request)
        self._request = request
        self._store = store
        self._log_dir = log_dir
        self._stale_run_id = stale_run_id
        self._manifest = manifest
        self._attempt = -1
        self._waiting_since: float | None = None
        self._is_over = False
        """Whether hosts are told to end, however the run stands."""
        self._impatient = False
        """Whether a stop was asked for once more when the training was over."""
        self._loop = Loop()
        self._files = Background(self._loop, "files")
        self._user_code = Background(self._loop, "callbacks")
        self._held: list[Callable[[], None]] = []
        """Events that are heard when the checkpoints of the attempt are committed."""
        self._hosts = Connections(
            self._loop,
            transports,
            request,
            heard=self._on_message,
            lost=self._on_lost,
        )
        self._validations = Validations(request, store, log_dir=log_dir)
        self._ledger = ReportHandler(
            store,
            checkpoint_config,
            tell=self._tell_rank,
            upload=self._tell_rank,
            saved=lambda path: self._happened(events.CheckpointAvailable(path)),
            callbacks=callbacks,
            validations=self._validations,
        )
        self._callbacks = callbacks
        if callbacks is not None:
            callbacks.begin(self._user_code)
        self._outputs = RankOutputs(self._log, self._files, console_ranks)
        self._checks = CheckedLaunch(
            self._loop,
            request,
            store,
            self._files,
            send=self._hosts.send,
            refuse=lambda host, why: self._happened(events.MessageReceived(host, wire.HostFailed(text=why))),
        )
        self._watch = HangMonitor(
            self._loop,
            store,
            request.failure_config,
            ask=self._ask_for_stacks,
            addresses=self._addresses,
            send=self._hosts.send,
            hung=self._happened,
        )

    @property
    def end(self) -> events.RunSummary:
        """How the run stands or has ended."""
        machine, outcomes = self.machine, self.machine.outcomes
        return events.RunSummary(
            state=machine.state,
            attempt=machine.attempt,
            metrics=self._ledger.metrics,
            value=outcomes[0].body if machine.is_done else None,
            failures=machine.failures,
            stopped_ranks=machine.stopped_ranks,
            last_lines={rank: last_words(lines) for rank, lines in self._outputs.last_lines().items()},
            stop_reason=machine.stop_reason,
            problem=machine.problem,
            hung=machine.hung,
            no_retry=machine.retries.refusal,
            entered=machine.retries.ever_entered,
            earlier=list(machine.earlier),
            hosts=[rank.host for rank in machine.plan.ranks] if machine.plan else (),
            finished=sorted(outcomes),
            where=self._watch.where(machine.stopped_ranks),
            storage_failed=machine.storage_failed,
            resources_missing=machine.resources_missing,
        )

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train. Returns when the run has ended and every host is empty; whatever is raised, nothing is left."""
        self._store.on_failure = self._storage_failed
        try:
            with self._loop.signals(STOP_SIGNALS, self._on_signal):
                self._run()
        finally:
            if self._callbacks is not None:
                self._callbacks.end()
            self._store.detach()
            self._files.close()
            self._user_code.close()
            self._loop.close()

    def _run(self) -> None:
        try:
            if self._stale_run_id is not None:  # it ended without a word: not even its agents may have cleaned up
                self._hosts.sweep(self._stale_run_id)
            self._watch.open()
            self._store.start(self._loop, self._files, self._request.run_id, self._request.python_flags)
            self._validations.start(self._loop)
            self._do(self.machine.start(time.monotonic()))
            self._hosts.ping()
            while not self.machine.state.is_terminal:
                self._arm_timers()
                self._loop.step()
                self._hear_held()
                self._flush()
        finally:
            self._close()

    def _arm_timers(self) -> None:
        """One timer for each who has a deadline."""
        for name, moment, callback in (
            ("machine", self._machine_deadline(), lambda: self._happened(events.Tick())),
            ("ledger", self._ledger.deadline(), self._ledger.tick),
            ("validations", self._validations.deadline(), self._validations.tick),
            ("watch", self._watch.deadline() if self._is_training else None, self._watch.tick),
        ):
            if moment is None:
                self._loop.cancel(name)
            else:
                self._loop.call_at(name, moment, callback)

    def _machine_deadline(self) -> float | None:
        """Return None while we make the machine wait, and when an exception has ended the run before it could."""
        waits = self._is_over or self._held or self._waiting_since is not None
        return None if waits else self.machine.deadline()

    @property
    def _is_committing(self) -> bool:
        """True while a checkpoint is being committed, unless the user has ended the wait for it."""
        return self._store.is_committing and not self._impatient

    def _hold(self, hear: Callable[[], None]) -> None:
        """Hear of something when the checkpoints are committed: whether and where to start again depends on them."""
        if not self._held:
            self._loop.call_in("held", _SILENT_WAIT_S, self._store.announce_wait)
        self._held.append(hear)

    def _hear_held(self) -> None:
        if self._held and not self._is_committing:
            self._loop.cancel("held")
            held, self._held = self._held, []
            for hear in held:
                hear()

    def _flush(self) -> None:
        self._ledger.flush()
        self._outputs.flush()

    # -- what hosts say -------------------------------------------------------------------------------------------

    def _on_message(self, host: str, message: wire.Message) -> None:
        if getattr(message, "attempt", self._attempt) != self._attempt:
            return
        match message:
            case wire.PortsReserved() | wire.HostIdle() if self._is_committing:
                self._hold(lambda: self._on_message(host, message))
            case wire.HostIdle() if self.machine.attempt_is_on and self._waits_for_uploads():
                self._loop.call_in(f"gone {host}", _SETTLE_S, lambda: self._on_message(host, message))
            case wire.StorageOpened(failed=failed):
                if failed is not None:
                    self._storage_failed(f"{host} cannot use the storage: {failed}")
            case wire.Output():
                self._watch.progress()
                self._outputs.of(message.rank).feed(message.stream, message.body)
            case wire.StackDump():
                self._watch.came(message.rank, message.body)
            case wire.StacksDone():
                self._watch.taken(host, message.silent, sorted(self.machine.outcomes))
            case (
                wire.Reported()
                | wire.FilesCopied()
                | wire.Discarded()
                | wire.CollectiveEntered()
                | wire.AskCheckpointList()
            ):
                self._watch.progress()
                self._ledger.handle(message)
                if self.machine.waits_for_checkpoint:
                    self._tell_storing()
            case wire.Running():
                self._watch.progress()
                self._ledger.handle(message)
                self._happened(events.MessageReceived(host, message))
            case wire.Outcome():
                self._on_outcome(host, message)
            case wire.Exited():
                if self._is_training or self.machine.waits_for_checkpoint:
                    self._tell_storing(message.rank)
                reason = native_reason(self._outputs.of(message.rank).last_lines)
                reports = self._ledger.reports.get(message.rank, 0)
                self._happened(events.MessageReceived(host, message, reports, reason))
            case wire.PortsReserved():
                self._happened(events.MessageReceived(host, message))
                if self.machine.plan is not None and self._is_training:
                    self._checks.begin(self.machine.plan)
            case wire.ProbePortOpened() | wire.ProbeResult() if self._watch.tries_pairs:
                self._watch.met(host, message)
            case wire.InspectionResult() | wire.ProbePortOpened() | wire.ProbeResult():
                if self._checks.is_under_way:
                    self._checks.heard(host, message)
            case _:
                self._happened(events.MessageReceived(host, message))

    def _on_lost(self, host: str, why: str) -> None:
        if self._is_committing and self.machine.occupied == [host]:  # with it, the attempt ends
            self._hold(lambda: self._on_lost(host, why))
            return
        self._checks.lost(host)
        ranks = [rank.rank for rank in self.machine.plan.on(host)] if self.machine.plan else []
        ends = self.machine.state is RunState.RELEASING
        self._tell_storing(*ranks)
        self._happened(events.HostLost(host, why, owes=self._ledger.awaits(ranks, ends=ends)))

    def _on_outcome(self, host: str, outcome: wire.Outcome) -> None:
        if outcome.traceback:
            self._outputs.of(outcome.rank).note(outcome.traceback)
        self._ledger.handle(outcome)
        if not outcome.ok or self.machine.waits_for_checkpoint:
            self._tell_storing(*([] if outcome.ok else [outcome.rank]))
        self._happened(events.MessageReceived(host, outcome, self._ledger.reports.get(outcome.rank, 0)))

    def _tell_storing(self, *failing: int) -> None:
        """Tell the machine what is being stored, before it hears that the ``failing`` ranks have failed."""
        failed = {*self.machine.failed_ranks, *failing}
        self._happened(self._ledger.storing(failed))

    def _waits_for_uploads(self) -> bool:
        """Whether the end of the attempt, whose processes are gone, is put off until what uploaders are bringing makes
        a checkpoint: less is lost by that than the time it takes. For ever only if all work is done, and only as long
        as the grace lasts if the user wants the run to stop.
        """
        if self._ledger.awaits_uploads(self.machine.lost_ranks):
            now, stopped = time.monotonic(), self.machine.was_asked_to_stop
            if self._waiting_since is None:
                self._waiting_since = now
                silent_s = 0.0 if self.machine.failures else _SILENT_WAIT_S
                self._loop.call_in("uploads", silent_s, lambda: say("waiting for the checkpoint that is being stored"))
            patience_s = math.inf if self.machine.is_done and not self.machine.problem else _UPLOAD_PATIENCE_S
            if now < self._waiting_since + (self._request.stop_grace_s if stopped else patience_s):
                return True
        self._wait_no_more()
        return False

    def _wait_no_more(self) -> None:
        self._waiting_since = None
        self._loop.cancel("uploads")

    # -- what the machine wants -----------------------------------------------------------------------------------

    def _happened(self, event: events.Event) -> None:
        self._do(self.machine.handle(event, time.monotonic()))

    def _do(self, actions: list[events.Action]) -> None:
        for action in actions:
            match action:
                case events.Tell(host, message):
                    self._hosts.send(host, message)
                    if isinstance(message, wire.Prepare) and (opening := self._store.open_order()) is not None:
                        self._hosts.send(host, opening)
                case events.Connect(host) if not self._is_over:
                    self._hosts.connect(host)
                case events.Say(text, once):
                    (warn_once if once else warn)(text)
                case events.AttemptStarts():
                    self._begin_attempt(action)
                case events.AttemptEnded():
                    self._end_attempt(action)

    def _begin_attempt(self, starts: events.AttemptStarts) -> None:
        attempt, plan = starts.attempt, starts.plan
        self._attempt = attempt
        self._manifest.attempt_begins(attempt, plan)
        self._store.make_parent(self._log(attempt, 0))
        self._ledger.begin(attempt, plan.world_size)
        self._watch.begin(attempt)
        self._outputs.begin(attempt, [rank.host for rank in plan.ranks])

    def _end_attempt(self, ended: events.AttemptEnded) -> None:
        self._wait_no_more()
        self._ledger.end()
        self._outputs.close()
        self._manifest.attempt_ended(ended.failures, ended.why)
        if self._callbacks and ended.failures and self.machine.stop_reason is None:
            failures = ended.failures
            self._callbacks.after_exception(lambda: {failure.rank: original(failure) for failure in failures})

    def _log(self, attempt: int, rank: int) -> Path:
        return self._store.paths.log(attempt, rank, self._log_dir)

    # -- what others want -----------------------------------------------------------------------------------------

    def _ask_for_stacks(self) -> list[str]:
        plan = self.machine.plan
        if plan is None or not self._is_training:
            return []
        for name in plan.hosts:
            self._hosts.send(name, wire.TakeStacks(attempt=self._attempt))
        return list(plan.hosts)

    def _addresses(self) -> Mapping[str, str]:
        plan = self.machine.plan
        if plan is None or plan.shares_network or self._checks.is_under_way:
            return {}
        return dict(zip(plan.hosts, plan.addresses, strict=True))

    @property
    def _is_training(self) -> bool:
        return not self._is_over and self.machine.state in (RunState.STARTING, RunState.RUNNING)

    def _storage_failed(self, why: str) -> None:
        """What cannot be kept ends the run: training on would lose it. The machine hears of it once."""
        if self.machine.state in (RunState.FAILED, RunState.ABORTED):  # and ends with what it has heard of first
            warn(why)
        self._happened(events.StorageFailed(why))

    def _tell_rank(self, message: wire.ToWorker | wire.Upload | wire.Clear) -> None:
        assert self.machine.plan is not None
        self._hosts.send(self.machine.plan.ranks[message.rank].host, message)

    # -- the end --------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        note_stop(number)
        why = signal.Signals(number).name
        if self._validations.busy and self.machine.state is RunState.FINISHED:
            self._validations.give_up(f"{why} has ended the wait for it")
        elif self._is_over or self.machine.state.is_terminal or (self._held and self.machine.was_asked_to_stop):
            self._impatient = True
        self._happened(events.StopRequested(why))

    def _close(self) -> None:
        self._is_over = True
        self._loop.cancel("held")
        steps = (
            self._hosts.close,
            self._outputs.close,
            self._ledger.close,
            self._watch.close,
            self._await_storage,
            self._await_validations,
            self._await_callbacks,
        )
        with contextlib.ExitStack() as stack:  # each is taken, whatever another one raises
            for step in reversed(steps):
                stack.callback(step)

    def _await_storage(self) -> None:
        """Wait until everything is written; Ctrl-C ends the waiting."""
        self._loop.call_in("storage", _SILENT_WAIT_S, self._store.announce_wait)
        self._wait_until(lambda: self._store.is_idle)
        self._loop.cancel("storage")
        if not self._store.is_idle:
            self._store.abandon_pending_work()

    def _await_callbacks(self) -> None:
        """Wait until the user's callbacks have returned; Ctrl-C ends the waiting."""
        self._loop.call_in("callbacks", _SILENT_WAIT_S, lambda: say("waiting for a callback; Ctrl-C ends the waiting"))
        self._wait_until(lambda: not self._user_code.pending)
        self._loop.cancel("callbacks")

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait. Once Ctrl-C has ended the waiting, what is quick still gets done."""
        least = time.monotonic() + _LEAST_WAIT_S
        self._loop.call_at("least", least, lambda: None)
        while not (done() or (self._impatient and time.monotonic() >= least)):
            self._arm_timers()
            self._loop.step()
            self._flush()

    def _await_validations(self) -> None:
        """Of a run that has finished; otherwise they are done when it goes on. Ctrl-C ends the waiting."""
        if self._validations.busy and self.machine.state is RunState.FINISHED:
            say(WAITING)
            while self._validations.busy:
                self._arm_timers()
                self._loop.step()
        self._validations.abort()
        self._await_storage()

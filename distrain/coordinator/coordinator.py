"""The loop in the user's process, between the hosts and the decisions about the run. Runs in: coordinator.

Messages of hosts are handled by the run machine, which decides what to do, by the :class:`ReportHandler`, or by the
:class:`HangMonitor`. The coordinator carries out the machine's actions.

The loop runs in the thread that called fit(), without asyncio, so it works in notebooks. It is event-driven: it sleeps
until a descriptor is ready or a deadline comes. It never waits for a disk, a callback of the user's or a console: those
have threads of their own (:mod:`distrain.system.background`, :mod:`distrain.system.consoles`).
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distrain import wire
from distrain.api.observer import AttemptBegan, AttemptEnded, Printed, RankEnded, Stopping
from distrain.coordinator.checkpoint_copies import CheckpointCopies
from distrain.coordinator.checkpoint_desk import CheckpointDesk
from distrain.coordinator.connection.agent_link import FILES_PER_HOST
from distrain.coordinator.debuggers import Debuggers
from distrain.coordinator.evidence import Evidence
from distrain.coordinator.fitness.sniff_tests import SniffTests
from distrain.coordinator.hang_monitor import HangMonitor
from distrain.coordinator.host_files import HostFiles
from distrain.coordinator.launch_checks import LaunchChecks
from distrain.coordinator.report_handler import ReportHandler
from distrain.coordinator.requests import DEBUG, PROFILE, STACKS, STOP, Requests, rank_in
from distrain.coordinator.stop_signals import note_stop, stop_signals
from distrain.coordinator.store.rank_logs import RankLogs
from distrain.coordinator.validations import WAITING, Validations
from distrain.decisions import events
from distrain.decisions.blame import culprit_first
from distrain.decisions.checkpoints.actions import (
    AttemptBegins,
    AttemptEnds,
    HostLost,
    RunBegins,
    RunEnds,
    StoreLast,
    Tick,
)
from distrain.decisions.checkpoints.life import Checkpoints
from distrain.decisions.checkpoints.site import Site
from distrain.decisions.run_machine import RunStateMachine
from distrain.decisions.states import RunState
from distrain.system.background import Background
from distrain.system.log import say, warn, warn_once
from distrain.system.loop import Loop, PausableClock
from distrain.system.output_lines import with_one_bar
from distrain.system.pickling import pickled
from distrain.system.process import raised_fd_limit
from distrain.system.stacks import native_reason
from distrain.system.text import BY_COMMAND
from distrain.worker.job.job import original

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from distrain.api.config import CheckpointConfig
    from distrain.coordinator.host_files import Shipping
    from distrain.coordinator.observers import Observers
    from distrain.coordinator.ranks.port import Ranks
    from distrain.coordinator.run.manifest import RunManifest
    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.blame import RunSummary
    from distrain.decisions.events import RunRequest
    from distrain.decisions.host_checks import Finding
    from distrain.storage.checkpoint import Checkpoint

_NOTICE_AFTER_S = 5.0
"""Seconds to wait for the storage before a line on the console says so."""
_LEAST_WAIT_S = 1.0
"""Seconds to wait for the storage at the end of a run, even if Ctrl-C ends the waiting."""


@dataclass(eq=False)
class Coordinator:
    """One run. After :meth:`run`, ``end`` is its summary.

    ``report_handler``, ``outputs``, ``hang_monitor`` and ``evidence`` have what else its error or result needs.

    start_without_own: called in a thread if all own checkpoints are damaged; returns where to start then.
    """

    request: RunRequest
    store: RunStore
    ranks: Ranks
    checkpoint_config: CheckpointConfig
    observers: Observers
    manifest: RunManifest
    shipping: Shipping
    start_without_own: Callable[[], str | None] = lambda: None

    def __post_init__(self) -> None:
        request, store, observers = self.request, self.store, self.observers
        self.machine = RunStateMachine(request)
        self._attempt = -1
        self._is_over = False
        """True once every host was ordered to end, whatever the state of the run."""
        self._impatient = False
        """True once a stop was requested again after the training."""
        self._signalled_hosts_with: str | None = None
        """The signal of the scheduler that stopped the run through a host, until it has reached this process, too."""
        self._loop = Loop()
        self._files = Background(self._loop, "files")
        self._verification = Background(self._loop, "verification")
        self._is_doubtful = False
        """True if ranks have raised before any report: perhaps the checkpoint that they loaded is damaged."""
        self.ranks.begin(self._loop, on_message=self._on_message, on_lost=self._on_lost)
        self._host_files = HostFiles(
            self._loop,
            self._files,
            self.shipping,
            flags=request.python_flags,
            send=self.ranks.send,
            stream=self.ranks.stream_argv,
            receive=self._on_message,
            refuse=self._refuse,
        )
        lacks_storage = self._host_files.lacks_storage
        self._copies = CheckpointCopies(self._host_files, self._verification)
        self._validations = Validations(self._loop, request, store, lambda *ended: self._desk.validated(*ended))
        self._clock = PausableClock()
        site = Site(
            self.checkpoint_config,
            store.location,
            store.is_remote,
            find_plan=lambda: self.machine.plan,
            checkpoint=request.checkpoint,
            racks={host: settings.rack for host, settings in request.hosts.items()},
            validates=request.validator is not None,
            metadata=store.metadata,
            lacks_storage=lacks_storage,
            is_training=lambda: self._is_training,
            is_idle=lambda: store.is_idle,
        )
        self.checkpoints = Checkpoints(store.ledger, site)
        self.report_handler = ReportHandler(
            store,
            observers,
            send=self._send_to_rank,
            pass_on=lambda report: self._desk.handle(report),
            has_part=self.checkpoints.has_part,
            clock=self._clock,
        )
        self._desk = CheckpointDesk(
            self.checkpoints,
            store,
            self._copies,
            self._validations,
            self._verification,
            self._clock,
            send=self.ranks.send,
            upload=self._upload,
            show=self._show,
            tell=observers.tell,
            find_other=self.start_without_own,
            on_start=lambda path: self._happened(events.CheckpointAvailable(path)),
            on_settled=self._on_settled,
            on_roll_back=self._roll_back,
            is_over=lambda: self._is_over,
        )
        self.outputs = RankLogs(store.paths.log, self._files)
        self._launch_checks = LaunchChecks(
            self._loop,
            request,
            self._files,
            send=self.ranks.send,
            report=self._report,
            imports=self._host_files.imports,
        )
        self.evidence = Evidence(store)
        self.hang_monitor = HangMonitor(
            self._loop,
            self.evidence,
            request.failure_config,
            ask_for_stacks=self._ask_for_stacks,
            ask_ranks=self._ask_ranks,
            on_hang=self._on_hang,
            tell=observers.tell,
        )
        self._debuggers = Debuggers(
            self._loop,
            store,
            observers.status,
            debug_rank=request.debug_rank,
            send=self._send_to_debugger,
        )
        replaces = request.failure_config.on_slow == "replace"
        self._sniff_tests = SniffTests(replaces, observers, self._send_to_rank, self.machine.spares_for, self._happened)
        observers.add(self._sniff_tests)
        self._requests = Requests(
            self._loop,
            store,
            {
                STACKS: self.hang_monitor.answer,
                STOP: lambda reply, _: self._on_stop_request(reply),
                DEBUG: self._debuggers.connect,
                PROFILE: self._take_profile,
            },
        )

    @property
    def end(self) -> RunSummary:
        """The state of the run, and how it ended if it has."""
        return self.machine.summary(self.ranks.errors)

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train. Return when the run has ended; no process of it survives on any host, even on an error.

        Only an agent of this machine may rest, with its forkserver, for the next run of this process.

        Raises ResourcesError if this process may not open enough files for the connections to all hosts.
        """
        self.store.on_failure = self._storage_failed
        hosts = len(self.request.hosts)
        more = self.request.scaling.max_workers + 2 * hosts  # each rank has a log, and a host may have a mover
        try:
            with (
                raised_fd_limit(hosts * FILES_PER_HOST, hosts * FILES_PER_HOST + more),
                self._loop.signals(stop_signals(self.request.stop_signals), self._on_signal),
            ):
                self._run()
        finally:
            self.store.detach()
            self._files.close()
            self._verification.close()
            self._loop.close()

    def _run(self) -> None:
        try:
            self.ranks.open()
            self._requests.open()
            self.store.start(self._loop, self._files, self.request.run_id, self.request.python_flags)
            self._do(self.machine.start(time.monotonic()))
            self._desk.handle(RunBegins())
            while not self._is_finished():
                self._arm_timers()
                self._loop.step()
                self._note_outstanding()
                self._flush()
        finally:
            self._close()

    def _is_finished(self) -> bool:
        return self.machine.state.is_terminal

    def _arm_timers(self) -> None:
        """Set one timer for each part that has a deadline."""
        self._pause_or_resume()
        for name, moment, callback in (
            ("machine", None if self._is_over else self.machine.deadline(), lambda: self._happened(events.Tick())),
            ("report_handler", self.report_handler.deadline(), self.report_handler.tick),
            ("observers", self.observers.deadline(), lambda: self.observers.tick(time.monotonic())),
            ("validations", self._validations.deadline(), self._validations.tick),
            ("hang_monitor", self._hang_deadline(), self.hang_monitor.tick),
            ("checkpoints", self._clock.monotonic(self.checkpoints.deadline()), lambda: self._desk.handle(Tick())),
        ):
            if moment is None:
                self._loop.cancel(name)
            else:
                self._loop.call_at(name, moment, callback)

    def _hang_deadline(self) -> float | None:
        """Return None while a rank waits for files of a checkpoint, which isn't a hang, or for a person."""
        is_storing = self._copies.is_busy or self.checkpoints.is_storing_for_ranks
        waits = (is_storing and self.hang_monitor.standstills.is_asking) or self._clock.is_paused
        return self.hang_monitor.deadline() if self._is_training and not waits else None

    def _flush(self) -> None:
        self.report_handler.flush()
        self.outputs.flush()

    # -- messages of hosts ----------------------------------------------------------------------------------------

    def _on_message(self, host: str, message: wire.Message) -> None:
        if getattr(message, "attempt", self._attempt) != self._attempt:
            return
        match message:
            case wire.Reported():
                self.hang_monitor.progress()
                self.report_handler.on_reported(host, message)
            case wire.CollectiveEntered():
                self.hang_monitor.progress()
                self.report_handler.on_collective(host, message)
            case wire.FilesCopied() | wire.PartWritten() | wire.AskCheckpointList() | wire.FetchCheckpoint():
                self.hang_monitor.progress()
                self._desk.handle(message, host)
            case wire.Output():
                self.hang_monitor.progress()
                data = with_one_bar(message.body)
                self.outputs.of(message.rank).feed(message.stream, data)
                self.observers.tell(Printed(message.rank, message.stream, data, time.monotonic()))
            case wire.DebuggerSays():
                self._debuggers.handle(message)
            case wire.Dump():
                if message.what != "last_collectives":
                    self.evidence.keep(message.what, message.rank, message.body)
                if message.what in ("flight_recorder", "last_collectives"):
                    self.hang_monitor.add_record(message.rank, message.body)
            case wire.Standstill():
                if self._is_training:
                    self.hang_monitor.heard(message)
            case wire.Sniffed():
                self._sniff_tests.handle(message)
            case wire.StackDump():
                self.hang_monitor.add_stacks(message.rank, message.body)
            case wire.StacksDone():
                self.hang_monitor.host_done(host, message)
                self._happened(events.MessageReceived(host, message))
            case wire.HostSetUp():
                self._host_files.on_set_up(host, message)
            case wire.RoundCopied() | wire.RoundGathered() | wire.ReadPart() | wire.PartRead():
                self._desk.handle(message, host)
            case wire.StorageStatus(failed=failed):
                if failed is not None:
                    self._storage_failed(f"{host} cannot use the storage: {failed}")
            case wire.Running():
                self.hang_monitor.progress()
                self.hang_monitor.standstills.ranks.add(message.rank)
                self.report_handler.on_running(host, message)
                self._desk.handle(message, host)
                self._happened(events.MessageReceived(host, message))
                if self.machine.state is RunState.RUNNING:  # it was the last rank
                    self.manifest.attempt_trains()
            case wire.Vitals():
                self.report_handler.on_vitals(host, message)
            case wire.Troubles():
                self.report_handler.on_troubles(host, message)
            case wire.Outcome():
                self._on_outcome(host, message)
            case wire.Exited(rank=rank):
                if self.machine.has_succeeded(message):
                    ended = wire.Outcome(attempt=self._attempt, rank=rank, ok=True, stage="run", body=pickled(None))
                    self._on_outcome(host, ended)
                self._desk.handle(message, host)
                self._note_end(message.rank, ok=False)
                self._debuggers.rank_ended(message.rank)
                reason = native_reason(self.outputs.of(message.rank).last_lines)
                reports = self.report_handler.report_counts.get(message.rank, 0)
                self._happened(events.MessageReceived(host, message, reports, reason))
            case wire.HostSignalled():
                self._on_signal_of_host(message)
            case wire.HostProbed():
                self._launch_checks.handle(host, message)
            case _:
                self._happened(events.MessageReceived(host, message))

    def _on_lost(self, lost: events.HostLost) -> None:
        self._launch_checks.lost(lost.host)
        self._host_files.lost(lost.host)
        self._copies.lost(lost.host)
        ranks = [rank.rank for rank in self.machine.plan.on(lost.host)] if self.machine.plan else []
        self._desk.handle(HostLost(lost.host, ranks))
        for rank in ranks:
            self._debuggers.rank_ended(rank)
        self._happened(replace(lost, owes=self.checkpoints.awaits(ranks)))

    def _on_outcome(self, host: str, outcome: wire.Outcome) -> None:
        self._note_end(outcome.rank, ok=outcome.ok, rolls_back=outcome.rollback is not None)
        if outcome.traceback and self.request.keeps_logs:
            self.outputs.of(outcome.rank).note(outcome.traceback)
        self.report_handler.on_outcome(host, outcome)
        self._desk.handle(outcome, host)
        self._happened(events.MessageReceived(host, outcome, self.report_handler.report_counts.get(outcome.rank, 0)))

    def _note_end(self, rank: int, *, ok: bool, rolls_back: bool = False) -> None:
        self.hang_monitor.rank_ended(rank, ok=ok)
        is_stopping = self.machine.state is RunState.STOPPING or rolls_back
        self.observers.tell(RankEnded(rank, "ended" if ok else "stopped" if is_stopping else "failed"))

    # -- actions of the machine -----------------------------------------------------------------------------------

    def _happened(self, event: events.Event) -> None:
        self._do(self.machine.handle(event, time.monotonic()))
        status = self.observers.status
        status.phase, status.is_stopping = self.machine.state.value, self.machine.was_asked_to_stop
        status.saves_on_stop = self.machine.saves_on_stop

    def _note_outstanding(self) -> None:
        """Tell the machine what is still being done with files, while it waits for that.

        Only between two turns of the loop: in the middle of one, a commit may be half noted.
        """
        before = None
        while self.machine.state.waits_for_files and self.machine.state is not before and not self._is_over:
            before = self.machine.state
            self._do(self.machine.handle(self._outstanding(before), time.monotonic()))

    def _outstanding(self, state: RunState) -> events.Outstanding:
        match state:
            case RunState.PREPARING:
                assert self.machine.plan is not None
                copying = self._host_files.is_busy(self.machine.plan.hosts)
                verifying = self.checkpoints.is_verifying or self.checkpoints.is_gathering
                return events.Outstanding(verifying=verifying, copying=copying)
            case RunState.SAVING:
                failed, waiting = self.machine.failed_ranks, self.hang_monitor.standstills.waiting
                saving = self.checkpoints.in_progress(failed, {*waiting, *self.report_handler.waiting})
                return events.Outstanding(saving=saving)
        rounds = self.checkpoints.rounds
        committing = self.checkpoints.is_committing or rounds.is_settling
        uploading = self.checkpoints.awaits_uploads()
        if self.machine.is_done and not (committing or uploading or self.machine.storage_failed):
            self._desk.handle(StoreLast())
            uploading = rounds.is_storing
        return events.Outstanding(committing=committing, uploading=uploading, lost=rounds.lost_work)

    def _do(self, actions: list[events.Action]) -> None:
        for action in actions:
            match action:
                case events.SendMessage(host, wire.Prepare() as message):
                    self._prepare(host, message)
                case events.SendMessage(host, message):
                    self.ranks.send(host, message)
                    if isinstance(message, wire.Start):
                        self._send_checkpoint(host)
                case events.ConnectHost(host) if not self._is_over:
                    self.ranks.connect(host)
                case events.ShowLine():
                    self._show(action)
                case events.AttemptStarts():
                    self._begin_attempt(action)
                case events.WorkersStart(plan):
                    self.manifest.workers_start()
                    self._host_files.announce(plan.hosts)
                    self._launch_checks.begin(plan)
                case events.AttemptEnded():
                    self._end_attempt(action)
                case events.RollBack():
                    self._desk.handle(action)

    def _show(self, line: events.ShowLine) -> None:
        (say if line.is_news else warn_once if line.once else warn)(line.text)

    def _prepare(self, host: str, message: wire.Prepare) -> None:
        """Send a host its job, once it has the files that its workers need."""

        def send() -> None:
            self.ranks.send(host, message)
            if (opening := self.store.open_order()) is not None:
                self.ranks.send(host, opening)

        if message.is_local:
            send()
        else:
            self._host_files.set_up(host, send)

    def _send_checkpoint(self, host: str) -> None:
        """Bring the checkpoint from which the attempt starts to a host that does not see it, before a rank asks."""
        path = self.machine.checkpoint
        if path and not self.store.ledger.is_in_memory(path) and self._host_files.lacks_storage(host):
            self._copies.fetch(host, path, lambda folder, failed: None)

    def _begin_attempt(self, starts: events.AttemptStarts) -> None:
        attempt, plan = starts.attempt, starts.plan
        if attempt > self.request.first_attempt:
            self._host_files.refresh(plan.hosts)
        self._attempt = attempt
        self.manifest.attempt_begins(attempt, plan)
        if self.request.keeps_logs:
            self.store.make_parent(self.store.paths.log(attempt, 0))
        self.observers.tell(AttemptBegan(attempt, [rank.host for rank in plan.ranks], time.monotonic()))
        self._desk.handle(AttemptBegins(attempt, len(plan.ranks), self._is_doubtful))
        self.report_handler.begin(attempt, len(plan.ranks), self.checkpoints.first_step)
        self.evidence.begin(attempt)
        self.hang_monitor.begin(len(plan.ranks))
        self._debuggers.close("the workers were restarted")
        self.outputs.begin(attempt)

    def _end_attempt(self, ended: events.AttemptEnded) -> None:
        if ended.attempt != self._attempt:  # its hosts were refused before it began
            return
        if not self.checkpoints.rounds.is_storing:  # that waits for what is fetched
            self._host_files.end_attempt()
        self._is_doubtful = not self.report_handler.report_counts and any(f.kind == "exception" for f in ended.failures)
        self._desk.handle(AttemptEnds())
        self._end_rows()
        self.hang_monitor.end_hang()
        self.outputs.flush()
        self.manifest.attempt_ended(ended.failures, ended.why)
        failures = culprit_first(ended.failures) if ended.failures and self.machine.stop_reason is None else []
        own = dict(self.ranks.errors)
        self.observers.tell(
            AttemptEnded(
                ended.attempt,
                failures,
                ended.why,
                lambda: {one.rank: own.get(one.rank) or original(one) for one in failures},
            )
        )

    def _on_settled(self, ordinal: int, checkpoint: Checkpoint | None) -> None:
        self.report_handler.settled(ordinal, checkpoint)
        self._end_rows()

    def _end_rows(self) -> None:
        """Complete the rows of an attempt that is over, once its checkpoints are committed."""
        if self.checkpoints.is_over and not self.checkpoints.is_committing:
            self.report_handler.end_rows()

    def _roll_back(self, asked: events.RollBack, suspect: str) -> None:
        """Continue at the checkpoint that was chosen. Later starts leave out the same rows."""
        latest, path, skip_to = self.store.ledger.latest, self.checkpoints.start, dict(asked.skip_to or {})
        if latest is None:
            self.manifest.skip_to |= skip_to
        self.store.append_event(
            "rollback",
            attempt=self._attempt,
            rank=asked.rank,
            host=asked.host,
            reports=asked.reports,
            why=asked.why,
            checkpoint=path,
            suspect=suspect or None,
            left_out=list(skip_to),
        )
        skips = self.manifest.skip_to if latest is None else latest.skip_to
        self._happened(events.RolledBack(path, skips or {}, suspect))

    # -- debugging ------------------------------------------------------------------------------------------------

    def _send_to_debugger(self, rank: int, body: bytes, opens: str) -> None:
        if self.machine.attempt_is_active and not self._is_over:
            self._send_to_rank(wire.DebuggerInput(attempt=self._attempt, rank=rank, body=body, opens=opens))

    def _pause_or_resume(self) -> None:
        """Stop the timers of the training while a rank waits for a person: other ranks wait for it."""
        self.observers.status.is_debugged = self._debuggers.is_waiting
        if self._debuggers.is_waiting:
            self._clock.pause()
        elif self._clock.is_paused:
            self._clock.resume()
            self.hang_monitor.progress()

    # -- requests of other parts ----------------------------------------------------------------------------------

    def _ask_for_stacks(self, watches: bool) -> list[str]:
        if not self._is_training:
            return []
        self._ask_ranks(wire.TellStandstill, self.observers.status.at_work())
        hosts = self.machine.living_hosts
        for name in hosts:
            self.ranks.send(name, wire.TakeStacks(attempt=self._attempt, watches=watches))
        return hosts

    def _ask_ranks(self, question: type[wire.ToWorker], ranks: Collection[int]) -> None:
        for rank in ranks:
            self._send_to_rank(question(attempt=self._attempt, rank=rank))

    def _take_profile(self, reply: Callable[[str], None], argument: str) -> None:
        """Have a rank profiled, and reply with the path of the file that appears when its profile is there."""
        rank, seconds = rank_in(argument, self.observers.status)
        file = self.evidence.path("profile", rank)
        self.store.delete_file(file)  # that of an earlier profile
        self._send_to_rank(wire.TakeProfile(attempt=self._attempt, rank=rank, seconds=float(seconds)))
        reply(str(file))

    @property
    def _is_training(self) -> bool:
        return not self._is_over and self.machine.state in (RunState.STARTING, RunState.RUNNING)

    def _storage_failed(self, why: str) -> None:
        """End the run: further training would be lost."""
        if self.machine.state in (RunState.FAILED, RunState.STOPPED):  # then the machine ignores it
            warn(why)
        self._happened(events.StorageFailed(why))

    def _send_to_rank(self, message: wire.ToWorker) -> None:
        self.ranks.send(self._host_of(message.rank), message)

    def _upload(self, host: str, order: wire.Upload) -> None:
        """Have files of a rank stored: by the uploader of the host, or from here if that does not see the storage."""
        if self._host_files.lacks_storage(host):
            self._host_files.upload(host, order)
        else:
            self.ranks.send(host, order)

    def _host_of(self, rank: int) -> str:
        assert self.machine.plan is not None
        return self.machine.plan.ranks[rank].host

    def _refuse(self, host: str, why: str) -> None:
        """End the run because a host cannot train."""
        self._happened(events.MessageReceived(host, wire.HostFailed(text=why)))

    def _report(self, finding: Finding) -> None:
        """End the run because of a problem of a host, or only warn of it."""
        if finding.is_fatal:
            self._refuse(finding.host, finding.text)
        else:
            warn(f"{finding.host}: {finding.text}")

    def _on_hang(self, hang: events.HangDetected) -> None:
        self._launch_checks.forget()
        self._happened(hang)

    # -- the end --------------------------------------------------------------------------------------------------

    def _on_signal_of_host(self, signalled: wire.HostSignalled) -> None:
        """Stop the run as if the scheduler had signalled this process. It may signal every host, and this process."""
        if not self.machine.was_asked_to_stop:
            self._on_signal(signal.Signals[signalled.signal])
            self._signalled_hosts_with = None if signalled.is_own else signalled.signal

    def _on_signal(self, number: int) -> None:
        why = signal.Signals(number).name
        if why == self._signalled_hosts_with:
            self._signalled_hosts_with = None
        else:
            self._stop_for(why)

    def _stop_for(self, why: str) -> None:
        note_stop(why)
        if self._validations.busy and self.machine.state is RunState.FINISHED:
            self._validations.give_up(f"{why} has ended the wait for it")
        elif self._is_over or self.machine.state.is_terminal:
            self._impatient = True
        elif self.machine.state is RunState.SETTLING and self.machine.was_asked_to_stop:
            self._impatient = True  # the run only waits for a checkpoint that is being stored
        self.observers.tell(Stopping(why))
        self._happened(events.StopRequested(why))

    def _on_stop_request(self, reply: Callable[[str], None]) -> None:
        """Stop the run as SIGTERM does, but only once: a second request kills no rank that is storing something."""
        if self.machine.was_asked_to_stop or self._is_over:
            reply("the run is stopping already")
        else:
            self._stop_for(BY_COMMAND)
            reply("the run is stopping")

    def _close(self) -> None:
        self._is_over = True
        self._verification.close()
        steps = (
            self._store_memory,
            self._bring_files_back,
            self._close_hosts,
            self._debuggers.close,
            self.outputs.flush,
            self.report_handler.flush,
            self._requests.close,
            self._await_storage,
            self._await_validations,
        )
        with contextlib.ExitStack() as stack:  # every step is taken, even if another one raises
            for step in reversed(steps):
                stack.callback(step)

    def _store_memory(self) -> None:
        """Store the newest checkpoint in memory before the hosts end; Ctrl-C ends the waiting."""
        self._desk.handle(StoreLast())
        self._await_writing(lambda: not self.checkpoints.rounds.is_storing)
        self._desk.handle(RunEnds())

    def _bring_files_back(self) -> None:
        """Copy what ranks have written on hosts without the storage to the run directory; Ctrl-C ends the waiting."""
        for host in self.request.hosts if self._attempt >= 0 else ():
            self._host_files.bring_back(host)  # one after the other, because they may have files of the same names
            self._await_writing(lambda: not self._host_files.is_delivering)
            if self._host_files.is_delivering:
                warn("some files of ranks are still on other hosts; they are copied when the run next uses those hosts")
                break
        self._host_files.warn_of_lost()

    def _close_hosts(self) -> None:
        self._host_files.close()
        self._copies.close()
        self.ranks.close(keep=self.machine.state in (RunState.FINISHED, RunState.FAILED))

    def _await_storage(self) -> None:
        """Wait until everything is written; Ctrl-C ends the waiting."""
        if self.machine.state is RunState.FINISHED:
            self.store.secure_records()
        self._await_writing(lambda: self.store.is_idle)
        if not self.store.is_idle:
            self.store.abandon_pending_work()

    def _await_writing(self, done: Callable[[], bool]) -> None:
        """Wait; if Ctrl-C ends the waiting, still wait for quick work, ``_LEAST_WAIT_S`` at most."""
        self._loop.call_in("storage", _NOTICE_AFTER_S, self.store.announce_wait)
        least = time.monotonic() + _LEAST_WAIT_S
        self._loop.call_at("least", least, lambda: None)
        while not (done() or (self._impatient and time.monotonic() >= least)):
            self._arm_timers()
            self._loop.step()
            self._flush()
        self._loop.cancel("storage")

    def _await_validations(self) -> None:
        """Wait for the validations of a finished run; Ctrl-C ends the waiting.

        The validations of any other run are made when it is resumed.
        """
        if self._validations.busy and self.machine.state is RunState.FINISHED:
            say(WAITING)
            while self._validations.busy:
                self._arm_timers()
                self._loop.step()
        self._validations.abort()
        self._await_storage()

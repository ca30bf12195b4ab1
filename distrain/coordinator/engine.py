"""The parts of a run, and what connects them. Runs in: coordinator.

Each part says itself which messages and events it hears (:func:`~distrain.decisions.hearing.hears`). Those that decide
something about the run go to the run machine, whose actions are carried out here.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.api.observer import AttemptBegan, AttemptEnded, RankEnded
from distrain.coordinator.checkpoint_copies import CheckpointCopies
from distrain.coordinator.checkpoint_desk import CheckpointDesk
from distrain.coordinator.debuggers import Debuggers
from distrain.coordinator.host_files import HostFiles
from distrain.coordinator.launch_checks import LaunchChecks
from distrain.coordinator.report_handler import ReportHandler
from distrain.coordinator.requests import rank_in
from distrain.coordinator.store.evidence import Evidence
from distrain.coordinator.store.rank_logs import RankLogs
from distrain.coordinator.validations import Validations
from distrain.decisions import events
from distrain.decisions.blame import culprit_first
from distrain.decisions.checkpoints.life import Checkpoints
from distrain.decisions.checkpoints.site import Site
from distrain.decisions.health.hangs import Hangs, Keep, Reply
from distrain.decisions.hearing import handlers_of, hears
from distrain.decisions.run_machine import MESSAGES, RunStateMachine
from distrain.decisions.states import RunState
from distrain.system.background import Background
from distrain.system.log import say, warn, warn_once
from distrain.system.loop import Loop, PausableClock
from distrain.system.pickling import pickled
from distrain.system.stacks import native_reason
from distrain.worker.job.job import original

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distrain.api.config import CheckpointConfig
    from distrain.coordinator.host_files import Shipping
    from distrain.coordinator.observers import Observers
    from distrain.coordinator.ranks.port import Ranks
    from distrain.coordinator.run.manifest import RunManifest
    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.blame import RunSummary
    from distrain.decisions.events import RunRequest
    from distrain.decisions.hearing import Handler
    from distrain.decisions.host_checks import Finding


@dataclass(eq=False)
class Engine:
    """The parts of one run.

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
        self.attempt = -1
        self.is_over = False
        """True once every host was ordered to end, whatever the state of the run."""
        self.loop = Loop()
        self.files = Background(self.loop, "files")
        self.verification = Background(self.loop, "verification")
        self.clock = PausableClock()
        """The time for which ranks wait for each other."""
        store.on_failure = self._storage_failed
        self.ranks.begin(self.loop, on_message=self.hear, on_lost=self._on_lost)
        self.host_files = HostFiles(
            self.loop,
            self.files,
            self.shipping,
            flags=request.python_flags,
            send=self.ranks.send,
            stream=self.ranks.stream_argv,
            receive=self.hear,
            refuse=self.refuse,
        )
        self.copies = CheckpointCopies(self.host_files, self.verification)
        site = Site(
            self.checkpoint_config,
            store.location,
            store.is_remote,
            find_plan=lambda: self.machine.plan,
            checkpoint=request.checkpoint,
            racks={host: settings.rack for host, settings in request.hosts.items()},
            validates=request.validator is not None,
            metadata=store.metadata,
            new_name=store.new_name,
            wall_time=time.time,
            token=secrets.token_hex(32),
            lacks_storage=self.host_files.lacks_storage,
            is_training=lambda: self.is_training,
            is_idle=lambda: store.is_idle,
        )
        self.checkpoints = Checkpoints(store.ledger, site)
        self.reports = ReportHandler(
            store,
            observers,
            self.checkpoints,
            send=self.send_to_rank,
            pass_on=lambda report: self.desk.handle(report),
            clock=self.clock,
        )
        self.validations = Validations(self.loop, request, store, lambda *ended: self.desk.validated(*ended))
        self.desk = CheckpointDesk(
            self.checkpoints,
            store,
            self.copies,
            self.validations,
            self.verification,
            self.clock,
            flush=self.reports.flush,
            send=self.ranks.send,
            upload=self._upload,
            show=_show,
            tell=observers.tell,
            find_other=self.start_without_own,
            on_start=lambda path: self.happened(events.CheckpointAvailable(path)),
            on_settled=self.reports.settled,
            on_roll_back=self._roll_back,
            is_over=lambda: self.is_over,
        )
        self.outputs = RankLogs(store.paths.log, self.files, observers.tell, keeps=request.keeps_logs)
        self.launch_checks = LaunchChecks(
            self.loop,
            request,
            self.files,
            send=self.ranks.send,
            report=self._report,
            imports=self.host_files.imports,
        )
        self.evidence = Evidence(store)
        self.hangs = Hangs(
            request.failure_config,
            hosts=lambda: self.machine.living_hosts if self.is_training else [],
            at_work=observers.status.at_work,
            since_1970=lambda moment: time.time() - (time.monotonic() - moment),
            folder=lambda: self.evidence.folder,
        )
        self.debuggers = Debuggers(
            self.loop,
            store,
            observers.status,
            debug_rank=request.debug_rank,
            send=self._send_to_debugger,
        )
        self._handlers: dict[type, list[Handler]] = {}
        """Who hears a kind of message or event, in the order in which they hear it. The run machine is the last."""
        self.add_part(self)
        self.add_part(self.manifest)
        self._add_handlers({kind: partial(self.watch, hear) for kind, hear in handlers_of(self.hangs).items()})
        files = (self.host_files, self.launch_checks, self.copies)
        for part in (self.evidence, self.debuggers, self.outputs, *files):
            self.add_part(part)
        self._add_handlers(self.desk.handlers)
        self.add_part(self.reports)
        self._add_handlers(dict.fromkeys(MESSAGES, lambda host, message: self.happened(message, host)))

    def _add_handlers(self, handlers: Mapping[type, Handler]) -> None:
        for kind, handler in handlers.items():
            self._handlers.setdefault(kind, []).append(handler)

    def add_part(self, part: object) -> None:
        """Let a part hear what it wants to."""
        self._add_handlers(handlers_of(part))

    @property
    def end(self) -> RunSummary:
        """The state of the run, and how it ended if it has."""
        return self.machine.summary(self.ranks.errors)

    # -- what is heard --------------------------------------------------------------------------------------------

    def hear(self, host: str, message: wire.Message) -> None:
        """Handle a message of a host, unless it is about another attempt."""
        if not isinstance(message, wire.OfAttempt) or message.attempt == self.attempt:
            self._tell_parts(host, message)

    def _tell_parts(self, host: str, event: object) -> None:
        for handler in self._handlers.get(type(event), ()):
            handler(host, event)

    def _on_lost(self, lost: events.HostLost) -> None:
        ranks = [rank.rank for rank in self.machine.plan.on(lost.host)] if self.machine.plan else []
        self._tell_parts(lost.host, lost)
        for rank in ranks:
            self.debuggers.rank_ended(rank)
        self.happened(replace(lost, owes=self.checkpoints.awaits(ranks)))

    @hears(wire.Outcome)
    def _on_outcome(self, _: str, outcome: wire.Outcome) -> None:
        self._note_end(outcome.rank, ok=outcome.ok, rolls_back=outcome.rollback is not None)

    @hears(wire.Exited)
    def _on_exited(self, host: str, message: wire.Exited) -> None:
        rank = message.rank
        if self.machine.has_succeeded(message):
            self.hear(host, wire.Outcome(attempt=self.attempt, rank=rank, ok=True, stage="run", body=pickled(None)))
        self._note_end(rank, ok=False, reason=native_reason(self.outputs.of(rank).last_lines))

    def _note_end(self, rank: int, *, ok: bool, rolls_back: bool = False, reason: str = "") -> None:
        """Tell observers and the machine how a rank ends. The message that says so follows."""
        is_stopping = self.machine.state is RunState.STOPPING or rolls_back
        self.observers.tell(RankEnded(rank, "ended" if ok else "stopped" if is_stopping else "failed"))
        self.happened(events.RankEnds(rank, self.reports.report_counts.get(rank, 0), reason))

    @hears(wire.OrderDone)
    def _on_storage_opened(self, host: str, message: wire.OrderDone) -> None:
        if message.failed is not None:
            self._storage_failed(f"{host} cannot use the storage: {message.failed}")

    def _storage_failed(self, why: str) -> None:
        """End the run: further training would be lost."""
        if self.machine.state in (RunState.FAILED, RunState.STOPPED):  # then the machine ignores it
            warn(why)
        self.happened(events.StorageFailed(why))

    def watch(self, what: Callable[..., None], *facts: Any) -> None:
        """Call a method of :attr:`hangs`, and do what follows from that."""
        self.hangs.now = time.monotonic()
        what(*facts)
        actions, self.hangs.actions = self.hangs.actions, []
        for action in actions:
            match action:
                case wire.ToWorker():
                    self.send_to_rank(action)
                case events.SendMessage(host, message):
                    self.ranks.send(host, message)
                case events.ShowLine():
                    _show(action)
                case events.HangDetected():
                    self.launch_checks.forget()
                    self.happened(action)
                case Keep(kind, rank, body):
                    self.evidence.keep(kind, rank, body)
                case Reply(reply, text):
                    reply(text)
                case _:
                    self.observers.tell(action)

    def refuse(self, host: str, why: str) -> None:
        """End the run because a host cannot train."""
        self.happened(wire.HostFailed(text=why), host)

    def _report(self, finding: Finding) -> None:
        """End the run because of a problem of a host, or only warn of it."""
        if finding.is_fatal:
            self.refuse(finding.host, finding.text)
        else:
            warn(f"{finding.host}: {finding.text}")

    # -- what the machine decides ---------------------------------------------------------------------------------

    def happened(self, event: events.Event | wire.Message, host: str = "") -> None:
        """Tell the machine, and do what it decides. ``host``: the one that a message is from."""
        self.do(self.machine.handle(event, time.monotonic(), host))
        status = self.observers.status
        status.phase, status.is_stopping = self.machine.state.value, self.machine.was_asked_to_stop
        status.saves_on_stop = self.machine.saves_on_stop

    def do(self, actions: list[events.Action]) -> None:
        """Carry out actions of the machine."""
        for action in actions:
            match action:
                case events.SendMessage(host, wire.Prepare() as message):
                    self._prepare(host, message)
                case events.SendMessage(host, message):
                    self.ranks.send(host, message)
                    if isinstance(message, wire.Start):
                        self._send_checkpoint(host)
                case events.ConnectHost(host):
                    if not self.is_over:
                        self.ranks.connect(host)
                case events.ShowLine():
                    _show(action)
                case events.AttemptStarts():
                    self._begin_attempt(action)
                case events.AttemptEnded(attempt):
                    if attempt == self.attempt:  # else its hosts were refused before it began
                        self._end_attempt(action)
                case _:
                    self._tell_parts("", action)

    def _prepare(self, host: str, message: wire.Prepare) -> None:
        """Send a host its job, once it has the files that its workers need."""

        def send() -> None:
            self.ranks.send(host, message)
            if (opening := self.store.open_order()) is not None:
                self.ranks.send(host, opening)

        if message.is_local:
            send()
        else:
            self.host_files.set_up(host, send)

    def _send_checkpoint(self, host: str) -> None:
        """Bring the checkpoint from which the attempt starts to a host that does not see it, before a rank asks."""
        path = self.machine.checkpoint
        if path and not self.store.ledger.is_in_memory(path) and self.host_files.lacks_storage(host):
            self.copies.fetch(host, path, lambda folder, failed: None)

    def _begin_attempt(self, starts: events.AttemptStarts) -> None:
        attempt, plan = starts.attempt, starts.plan
        if attempt > self.request.first_attempt:
            self.host_files.refresh(plan.hosts)
        self.attempt = attempt
        if self.request.keeps_logs:
            self.store.make_parent(self.store.paths.log(attempt, 0))
        self.observers.tell(AttemptBegan(attempt, [rank.host for rank in plan.ranks], time.monotonic()))
        self._tell_parts("", starts)

    def _end_attempt(self, ended: events.AttemptEnded) -> None:
        if not self.checkpoints.rounds.is_storing:  # that waits for what is fetched
            self.host_files.end_attempt()
        self._tell_parts("", ended)
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

    def _roll_back(self, asked: events.RollBack, suspect: str) -> None:
        """Continue at the checkpoint that was chosen. Later starts leave out the same rows."""
        latest, path, skip_to = self.store.ledger.latest, self.checkpoints.start, dict(asked.skip_to or {})
        if latest is None:
            self.manifest.skip_to |= skip_to
        self.store.append_event(
            "rollback",
            attempt=self.attempt,
            rank=asked.rank,
            host=asked.host,
            reports=asked.reports,
            why=asked.why,
            checkpoint=path,
            suspect=suspect or None,
            left_out=list(skip_to),
        )
        skips = self.manifest.skip_to if latest is None else latest.skip_to
        self.happened(events.RolledBack(path, skips or {}, suspect))

    # -- what parts need of each other ----------------------------------------------------------------------------

    @property
    def is_training(self) -> bool:
        """True while ranks are at work, or are being started."""
        return not self.is_over and self.machine.state in (RunState.STARTING, RunState.RUNNING)

    def send_to_rank(self, message: wire.ToWorker) -> None:
        """Send a message to the host of a rank."""
        assert self.machine.plan is not None
        self.ranks.send(self.machine.plan.ranks[message.rank].host, message)

    def _upload(self, host: str, order: wire.Upload) -> None:
        """Have files of a rank stored: by the uploader of the host, or from here if that does not see the storage."""
        if self.host_files.lacks_storage(host):
            self.host_files.upload(host, order)
        else:
            self.ranks.send(host, order)

    def _send_to_debugger(self, rank: int, body: bytes, opens: str) -> None:
        if self.machine.attempt_is_active and not self.is_over:
            self.send_to_rank(wire.DebuggerInput(attempt=self.attempt, rank=rank, body=body, opens=opens))

    def take_profile(self, reply: Callable[[str], None], argument: str) -> None:
        """Have a rank profiled, and reply with the path of the file that appears when its profile is there."""
        rank, seconds = rank_in(argument, self.observers.status)
        file = self.evidence.path("profile", rank)
        self.store.delete_file(file)  # that of an earlier profile
        self.send_to_rank(wire.Ask(attempt=self.attempt, rank=rank, what="profile", seconds=float(seconds)))
        reply(str(file))


def _show(line: events.ShowLine) -> None:
    (say if line.is_news else warn_once if line.once else warn)(line.text)

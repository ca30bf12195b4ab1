"""The parts of a run, and what connects them. Runs in: coordinator.

Each part says itself which messages, events and actions it hears (:mod:`distrain.decisions.hearing`). Three of them
decide something: the run machine about the run, :class:`Checkpoints` and :class:`Hangs` about these. Their actions go
to whichever part carries them out.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.api.observer import AttemptBegan, AttemptEnded, Committed, HangBegan, HangEnded, RankEnded
from distrain.coordinator.checkpoint_copies import CheckpointCopies
from distrain.coordinator.checkpoint_desk import CheckpointDesk
from distrain.coordinator.debuggers import Debuggers
from distrain.coordinator.host_files import HostFiles
from distrain.coordinator.launch_checks import LaunchChecks
from distrain.coordinator.report_handler import ReportHandler
from distrain.coordinator.requests import PROFILE, answer, check_rank
from distrain.coordinator.store.evidence import Evidence
from distrain.coordinator.store.rank_logs import RankLogs
from distrain.coordinator.validations import Validations
from distrain.decisions import events
from distrain.decisions.blame import culprit_first
from distrain.decisions.checkpoints import actions
from distrain.decisions.checkpoints.life import Checkpoints
from distrain.decisions.checkpoints.site import Site
from distrain.decisions.health.hangs import Hangs, Reply
from distrain.decisions.hearing import Parts, does, handlers_of, hears
from distrain.decisions.run.machine import MESSAGES, RunStateMachine
from distrain.decisions.states import RunState
from distrain.system.background import Background
from distrain.system.log import say, warn, warn_once
from distrain.system.loop import Loop, PausableClock
from distrain.system.pickling import pickled
from distrain.system.stacks import native_reason
from distrain.worker.job.job import original

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distrain.api.config import CheckpointConfig
    from distrain.api.observer import Fact
    from distrain.coordinator.host_files import Shipping
    from distrain.coordinator.observers import Observers
    from distrain.coordinator.ranks.port import Ranks
    from distrain.coordinator.store.manifest import RunManifest
    from distrain.coordinator.store.run_store import RunStore
    from distrain.decisions.events import RunRequest
    from distrain.decisions.host_checks import Finding
    from distrain.decisions.run_status import RunStatus
    from distrain.wire.channel import Channel


@dataclass(eq=False)
class Engine:
    """The parts of one run.

    status: the live state of the run, the first of the observers. start_without_own: called in a thread if all own
    checkpoints are damaged; returns where to start then.
    """

    request: RunRequest
    store: RunStore
    ranks: Ranks
    checkpoint_config: CheckpointConfig
    observers: Observers
    status: RunStatus
    manifest: RunManifest
    shipping: Shipping
    start_without_own: Callable[[], str | None]

    def __post_init__(self) -> None:
        request, store = self.request, self.store
        self.machine = RunStateMachine(request)
        self.attempt = -1
        self.is_over = False
        """True once every host was ordered to end, whatever the state of the run."""
        self.loop = Loop()
        self.files = Background(self.loop, "files")
        self.verification = Background(self.loop, "verification")
        self.clock = PausableClock()
        """The time for which ranks wait for each other."""
        self.parts = Parts()
        store.on_failure = self._storage_failed
        self.host_files = HostFiles(
            self.loop,
            self.files,
            self.shipping,
            self.ranks,
            flags=request.python_flags,
            receive=self.hear,
            refuse=self.refuse,
        )
        self.copies = CheckpointCopies(self.host_files)
        site = Site(
            self.checkpoint_config,
            store.location,
            store.is_remote,
            checkpoint=request.checkpoint,
            racks={host: settings.rack for host, settings in request.hosts.items()},
            validates=request.validator is not None,
            metadata=store.metadata,
            new_name=store.new_name,
            wall_time=time.time,
            token=secrets.token_hex(32),
            lacks_storage=self.host_files.lacks_storage,
            is_training=self._is_training,
            is_idle=lambda: store.is_idle,
        )
        self.checkpoints = Checkpoints(store.ledger, site)
        self.desk = CheckpointDesk(self.checkpoints, self.clock, self.flush, self.parts.tell)
        self.reports = ReportHandler(store, self.desk, self.status, self.observers.tell, self.send_to_rank)
        self.validations = Validations(self.loop, request, store, self.parts.tell)
        self.outputs = RankLogs(store.paths.log, self.files, self.observers.tell, keeps=request.keeps_logs)
        self.launch_checks = LaunchChecks(request, self.host_files, self._report)
        self.evidence = Evidence(store)
        self.hangs = Hangs(
            request.failure_config,
            hosts=lambda: self.machine.living_hosts if self._is_training() else [],
            since_1970=lambda moment: time.time() - (time.monotonic() - moment),
            folder=self.evidence.folder,
        )
        self.debuggers = Debuggers(store, self.status, debug_rank=request.debug_rank, ask=self._ask)
        self.timers: dict[str, tuple[Callable[[], float | None], Callable[[], None]]] = {
            "machine": (self._machine_deadline, partial(self.happened, "", events.Tick())),
            "reports": (self.reports.deadline, self.reports.tick),
            "checkpoints": (self.desk.deadline, self.desk.tick),
            "observers": (self.observers.deadline, self.observers.tick),
            "hangs": (self.hangs.deadline, partial(self.watch, self.hangs.tick)),
        }
        """By name: what returns when something is due (time.monotonic), or None, and what does it."""
        self.parts.add(self, self.manifest)
        self.parts.add_handlers({kind: partial(self.watch, hear) for kind, hear in handlers_of(self.hangs).items()})
        self.parts.add(self.evidence, self.debuggers, self.outputs, store)
        self.parts.add(self.host_files, self.launch_checks, self.copies, self.validations)
        self.parts.add_handlers(self.desk.handlers)
        self.parts.add(self.reports)
        self.parts.add_handlers({events.AttemptEnded: self._announce_end})
        self.parts.add_handlers(dict.fromkeys({*MESSAGES, events.HangDetected, actions.NewStart}, self.happened))

    # -- what is heard --------------------------------------------------------------------------------------------

    def hear(self, host: str, message: wire.Message) -> None:
        """Handle a message of a host, unless it is about another attempt."""
        if not isinstance(message, wire.OfAttempt) or message.attempt == self.attempt:
            self.parts.tell(host, message)

    def lose(self, lost: events.HostLost) -> None:
        """Note that a host is lost."""
        ranks = [rank.rank for rank in self.machine.plan.on(lost.host)] if self.machine.plan else []
        self.parts.tell(lost.host, lost)
        self.happened("", replace(lost, owes=self.checkpoints.assembly.awaits(ranks)))

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
        reports = self.checkpoints.assembly.attendance[rank].reports
        self.happened("", events.RankEnds(rank, reports, reason))

    @hears(wire.OrderDone)
    def _on_storage_opened(self, host: str, message: wire.OrderDone) -> None:
        if message.failed is not None:
            self._storage_failed(f"{host} cannot use the storage: {message.failed}")

    def _storage_failed(self, why: str) -> None:
        """End the run: further training would be lost."""
        if self.machine.state in (RunState.FAILED, RunState.STOPPED):  # then the machine ignores it
            warn(why)
        self.happened("", events.StorageFailed(why))

    def watch(self, what: Callable[..., None], *facts: Any) -> None:
        """Call a method of :attr:`hangs`, and do what follows from that."""
        self.hangs.now = time.monotonic()
        what(*facts)
        chosen, self.hangs.actions = self.hangs.actions, []
        self.do(chosen)

    def refuse(self, host: str, why: str) -> None:
        """End the run because a host cannot train."""
        self.happened(host, wire.HostFailed(text=why))

    def _report(self, finding: Finding) -> None:
        """End the run because of a problem of a host, or only warn of it."""
        if finding.is_fatal:
            self.refuse(finding.host, finding.text)
        else:
            warn(f"{finding.host}: {finding.text}")

    @does(HangBegan, HangEnded)
    def _announce(self, fact: Fact) -> None:
        self.observers.tell(fact)

    # -- what is decided ------------------------------------------------------------------------------------------

    def happened(self, host: str, event: events.Event | actions.NewStart | wire.Message) -> None:
        """Tell the machine, and do what it decides. ``host``: the one that a message is from."""
        self.do(self.machine.handle(event, time.monotonic(), host))
        self.status.phase, self.status.is_stopping = self.machine.state.value, self.machine.stopping.was_asked
        self.status.saves_on_stop = self.machine.stopping.lets_save

    def _machine_deadline(self) -> float | None:
        return None if self.is_over else self.machine.deadline()

    def do(self, chosen: Sequence[object]) -> None:
        """Carry out actions."""
        for action in chosen:
            # Hosts may be refused before an attempt has begun: then it ends first.
            if not isinstance(action, events.AttemptEnded) or action.attempt == self.attempt:
                self.parts.tell("", action)

    @does(events.SendMessage)
    def _send(self, action: events.SendMessage) -> None:
        host, message = action.host, action.message
        if isinstance(message, wire.Prepare):
            self._prepare(host, message)
            return
        self.ranks.send(host, message)
        if isinstance(message, wire.Start):
            self._send_checkpoint(host)

    @does(events.ConnectHost)
    def _connect(self, action: events.ConnectHost) -> None:
        if not self.is_over:
            self.ranks.connect(action.host)

    @does(events.ShowLine)
    def _show(self, line: events.ShowLine) -> None:
        (say if line.is_news else warn_once if line.once else warn)(line.text)

    @does(Reply)
    def _reply(self, answer: Reply) -> None:
        answer.reply(answer.text)

    @does(Committed)
    def _announce_commit(self, fact: Committed) -> None:
        self.observers.tell(replace(fact, now=time.monotonic()))

    @does(actions.StorageFails)
    def _on_storage_fails(self, action: actions.StorageFails) -> None:
        self._storage_failed(action.why)

    @does(actions.VerifyLatest)
    def _verify(self, action: actions.VerifyLatest) -> None:
        def then(damaged: int) -> None:
            if not self.is_over:
                action.then(damaged)

        self.store.verify(self.verification, is_needed=lambda: not self.is_over, then=then)

    @does(actions.FindOther)
    def _find_other(self, action: actions.FindOther) -> None:
        self.verification.do(self.start_without_own, action.then)

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
            self.copies.fetch(actions.BringTo(host, path, lambda folder, failed: None))  # its ranks ask for it

    @does(events.AttemptStarts)
    def _begin_attempt(self, starts: events.AttemptStarts) -> None:
        attempt, plan = starts.attempt, starts.plan
        if attempt > self.request.first_attempt:
            self.host_files.refresh(plan.hosts)
        self.attempt = attempt
        if self.request.keeps_logs:
            self.store.make_parent(self.store.paths.log(attempt, 0))
        self.observers.tell(AttemptBegan(attempt, [rank.host for rank in plan.ranks], time.monotonic()))

    @does(events.AttemptEnded)
    def _end_attempt(self, ended: events.AttemptEnded) -> None:
        if not self.checkpoints.rounds.is_storing:  # that waits for what is fetched
            self.host_files.end_attempt()

    def _announce_end(self, _: str, ended: events.AttemptEnded) -> None:
        failures = culprit_first(ended.failures) if ended.failures and self.machine.stopping.reason is None else []
        own = dict(self.ranks.errors)
        self.observers.tell(
            AttemptEnded(
                ended.attempt,
                failures,
                ended.why,
                lambda: {one.rank: own.get(one.rank) or original(one) for one in failures},
            )
        )

    @does(actions.RolledBack)
    def _roll_back(self, back: actions.RolledBack) -> None:
        """Continue at the checkpoint that was chosen. Later starts leave out the same rows."""
        asked, suspect = back.asked, back.suspect
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
        self.happened("", events.RolledBack(path, skips or {}, suspect))

    # -- what parts need of each other ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Have all reports and all output written that have arrived."""
        self.reports.flush()
        self.outputs.flush()

    def _is_training(self) -> bool:
        """Return whether ranks are at work, or are being started."""
        return not self.is_over and self.machine.state in (RunState.STARTING, RunState.RUNNING)

    @does(wire.Ask)
    def send_to_rank(self, message: wire.ToWorker) -> None:
        """Send a message to the host of a rank."""
        assert self.machine.plan is not None
        self.ranks.send(self.machine.plan.ranks[message.rank].host, message)

    def _ask(self, rank: int, **fields: Any) -> None:
        if self.machine.attempt_is_active and not self.is_over:
            self.send_to_rank(wire.Ask(attempt=self.attempt, rank=rank, **fields))

    def take_profile(self, asker: Channel, asked: wire.Ask) -> None:
        """Have a rank profiled, and answer with the path of the file that appears when its profile is there."""
        file = self.evidence.path(PROFILE, check_rank(asked.rank, self.status))
        self.store.delete_file(file, partial(answer, asker, str(file)))  # that of an earlier profile
        self._ask(asked.rank, what=PROFILE, seconds=asked.seconds)

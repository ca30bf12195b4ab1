"""The run as a state machine: ``RunStateMachine.handle(event, now) -> [Action]``. Runs in: coordinator.

Pure: no I/O, no clock, no threads. It alone changes the state of the run and of its ranks, and it keeps the story of
its moves. The coordinator feeds it what agents and workers say and does what it asks for.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.decisions.events import (
    Action,
    AttemptEnded,
    AttemptStarts,
    CheckpointAvailable,
    CheckpointsInProgress,
    ConnectHost,
    Event,
    HangDetected,
    HostLost,
    MessageReceived,
    RunRequest,
    SendMessage,
    ShowLine,
    StopRequested,
    StorageFailed,
    Tick,
)
from distrain.decisions.failures import culprit_first, failure_of, rank_list
from distrain.decisions.host_pool import CONNECT_TIMEOUT_S, HostPool, Readiness
from distrain.decisions.placement import (
    RANK_DEFAULTS,
    endpoints_of,
    make_plan,
    rank_environment,
    rendezvous_address,
    rendezvous_network,
    visible_devices,
)
from distrain.decisions.retries import RetryPolicy
from distrain.decisions.states import RANK_MOVES, RUN_MOVES, RankState, RunState
from distrain.decisions.stop_consensus import Order, StopConsensus
from distrain.errors import InvalidTransition, LaunchError, RankFailure, ResourcesError
from distrain.hosts.host import Gpu, HostInfo

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from distrain.hosts.world import RankPlan, WorldPlan

LOST_HOST_GRACE_S = 10.0
"""For lost hosts to come back before a restart that can do without them; as long as ssh tries to connect."""
STOP_TIMEOUT_S = 10.0
"""Beyond the grace: after this an agent that cannot empty its host is given up, by name."""
EXIT_TIMEOUT_S = 30.0
"""For exit handlers, after the work was done and reported; whoever needs longer is killed without being a failure."""
LEASE_MARGIN_S = 2.0
"""Until it is known that a host has been silent for as long as its lease."""
TERM_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL for ranks that were asked to stop, and did not."""
STORING_TIMEOUT_S = 30.0
"""Seconds that a failure leaves the other ranks to finish storing a checkpoint, before they are stopped."""
EXPECTED_TIMEOUT_S = 5.0
"""Seconds of those in which nobody stores anything, but a rank may come with a report that is due."""
_STORY_LENGTH = 200
_EARLIER_KEPT = 5


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {rank_list(ranks)}"


# -- the machine -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rank:
    plan: RankPlan
    state: RankState = RankState.PLANNED
    reports: int = 0
    reason: str = ""
    outcome: wire.Outcome | None = None
    exited: wire.Exited | None = None
    failed_order: int | None = None
    entered: bool = False


class RunStateMachine:
    """One run from the first HELLO to its end. ``state`` and ``failures`` are the result, ``story`` tells the moves."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self.state = RunState.CONNECTING
        self.attempt = request.first_attempt - 1
        self.checkpoint = request.checkpoint
        self.stop_reason: str | None = None
        self.problem: str | None = None
        self.resources_missing = False
        self.storage_failed = False
        self.plan: WorldPlan | None = None
        self.story: deque[str] = deque(maxlen=_STORY_LENGTH)
        self._roster = HostPool({name: order.slots for name, order in request.hosts.items()}, request.scaling)
        self._prepared: dict[str, int] = {}
        self._ranks: dict[int, _Rank] = {}
        self._address = ""
        self._endpoints: list[str] = []
        self._reserved: dict[str, wire.PortsReserved | None] = {}
        self._gone: set[str] = set()
        self._order = 0
        self._retry_forbidden = False
        self._storing = CheckpointsInProgress()
        self._checkpoint_limit = math.inf
        self.waits_for_checkpoint = False
        """True while the attempt has failed, and other ranks are given the time to store a checkpoint."""
        self._deadline: float | None = None
        self.hung: HangDetected | None = None
        """What the latest attempt was stopped for, if it hung."""
        self.earlier: deque[str] = deque(maxlen=_EARLIER_KEPT)
        """How the attempts before the latest one failed, a line each."""
        self.retries = RetryPolicy(request.failure_config, request.checkpoint)
        self._votes = StopConsensus()

    # -- results --------------------------------------------------------------------------------------------------

    @property
    def failures(self) -> list[RankFailure]:
        """How ranks of the latest attempt failed by themselves, in order of arrival."""
        found = []
        for number, rank in self._ranks.items():
            if rank.failed_order is not None:
                failure = failure_of(
                    number,
                    rank.plan.host,
                    rank.failed_order,
                    outcome=rank.outcome,
                    exited=rank.exited,
                    entered=rank.entered,
                    reason=rank.reason,
                )
                found += [failure] if failure else []
        return sorted(found, key=lambda failure: failure.order)

    @property
    def outcomes(self) -> dict[int, wire.Outcome]:
        """Good outcomes of the latest attempt, by rank."""
        return {n: rank.outcome for n, rank in self._ranks.items() if rank.outcome is not None and rank.outcome.ok}

    @property
    def is_done(self) -> bool:
        """Whether every rank of the latest attempt has done all its work, which need not be kept (yet)."""
        done = len(self.outcomes) == len(self._ranks) > 0
        return done and not any(outcome.stopped for outcome in self.outcomes.values())

    @property
    def stopped_ranks(self) -> list[int]:
        """Ranks of the latest attempt that we ended."""
        failed = {failure.rank for failure in self.failures}
        return [n for n in self._ranks if n not in failed and n not in self.outcomes]

    @property
    def was_asked_to_stop(self) -> bool:
        """Also if that is not why it ends, since it had failed before."""
        return self.stop_reason is not None or self._retry_forbidden

    @property
    def failed_ranks(self) -> list[int]:
        """Ranks of the latest attempt that failed by themselves or were lost."""
        return [number for number, rank in self._ranks.items() if rank.failed_order is not None]

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks of the latest attempt whose hosts are lost."""
        return [number for number, rank in self._ranks.items() if self._roster.is_gone(rank.plan.host)]

    @property
    def attempt_is_on(self) -> bool:
        """Whether there may be processes of the latest attempt."""
        return self.state in (RunState.STARTING, RunState.RUNNING, RunState.RELEASING, RunState.STOPPING)

    @property
    def occupied(self) -> list[str]:
        """Hosts on which the attempt may have processes, and that can still say so."""
        hosts = self.plan.hosts if self.plan is not None and self.attempt_is_on else ()
        return [host for host in hosts if host not in self._gone and not self._roster.is_gone(host)]

    def deadline(self) -> float | None:
        """When the machine wants a :class:`Tick`."""
        return min((moment for moment in (self._deadline, self._votes.deadline) if moment is not None), default=None)

    # -- events ---------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """To be called once: whom to connect to."""
        self._roster.begin(now, wait_s=0.0, patience_s=CONNECT_TIMEOUT_S)
        return self._muster(now)

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about ``event``. Raises InvalidTransition, with the story, when that cannot happen now."""
        if self.state.is_terminal and not (self.state is RunState.FINISHED and isinstance(event, StorageFailed)):
            return []
        match event:
            case MessageReceived(host, message, reports, reason):
                if isinstance(message, (wire.Outcome, wire.Exited)) and message.attempt == self.attempt:
                    self._ranks[message.rank].reports = reports
                    self._ranks[message.rank].reason = reason
                return self._on_message(host, message, now)
            case HangDetected():  # unless the attempt has ended while it was found out where the ranks are
                if self.state not in (RunState.STARTING, RunState.RUNNING):
                    return []
                self.hung = event
                return self._stop(0.0, now)
            case HostLost():
                return self._on_host_lost(event, now)
            case StopRequested(why):
                return self._on_stop_asked(why, now)
            case StorageFailed(why):
                self.storage_failed = True
                self.problem = self.problem or why
                return self._stop_or_give_up(self.problem, now)
            case CheckpointsInProgress():
                return self._on_storing(event, now)
            case CheckpointAvailable(path):
                self.checkpoint = path
                return []
            case Tick():
                return self._on_tick(now)

    def _on_message(self, host: str, message: wire.Message, now: float) -> list[Action]:
        match message:
            case wire.Hello():
                return self._on_hello(host, message, now)
            case wire.PortsReserved():
                return self._on_reserved(host, message, now)
            case wire.HostFailed():
                return self._on_host_failed(host, message.text, now)
            case wire.Notice():
                return [ShowLine(f"{host}: {message.text}", once=True)]
            case wire.HostIdle():
                return self._on_gone(host, message, now) if message.attempt == self.attempt else []
            case wire.Spawned() | wire.Exited() | wire.FromWorker():
                return self._on_rank(message, now) if message.attempt == self.attempt else []
            case _:
                return []

    def _on_hello(self, host: str, hello: wire.Hello, now: float) -> list[Action]:
        gpus = None if hello.gpus is None else tuple(Gpu(**gpu) for gpu in hello.gpus)
        order = self.request.hosts[host]
        facts = HostInfo(
            name=host,
            cpus=hello.cpus,
            memory_bytes=hello.memory_bytes,
            gpus=gpus,
            driver_problem=hello.driver_problem,
            slots=order.slots,
            network=hello.network,
            address="" if order.is_local else hello.address,  # there, ssh has come from who knows where
        )
        self._roster.came(host, facts)
        return self._muster(now) if self.state is RunState.CONNECTING else []

    def _muster(self, now: float) -> list[Action]:
        """Begin the next attempt if there are hosts for it; otherwise ask others, and wait, or give up."""
        asked: list[Action] = [ConnectHost(host) for host in self._roster.ask(now)]
        standing = self._roster.standing(now)
        if standing is Readiness.READY:
            return [*asked, *self._plan_attempt(now)]
        if self.state is not RunState.CONNECTING:
            self._move(RunState.CONNECTING)
        if standing is Readiness.HOPELESS:
            self._forget_attempt()
            return self._give_up(self._too_few_hosts(), now)
        self._deadline = self._roster.deadline()
        return asked

    def _plan_attempt(self, now: float) -> list[Action]:
        before = self.plan
        try:
            self.plan = make_plan(self._roster.present, self.request.scaling)
        except ResourcesError as error:
            self.resources_missing = True
            self._forget_attempt()
            return self._give_up(str(error), now)
        told = [*self._say_change(before, self.plan), *self._prepare_hosts(self.plan)]
        return [*told, *self._reserve(now)]

    def _forget_attempt(self) -> None:
        """It is not for what its ranks did that the run ends."""
        self._ranks, self.hung = {}, None

    def _say_change(self, before: WorldPlan | None, plan: WorldPlan) -> list[Action]:
        """What is not as in the attempt before, or as the user expects it."""
        same = (before.hosts, before.world_size) if before else (plan.hosts, self.request.scaling.max_workers)
        if (plan.hosts, plan.world_size) == same and not (before is None and self._roster.lost):
            return []
        without = f", without {', '.join(self._roster.lost)}" if self._roster.lost else ""
        reasons = [f"    {line}" for line in self._roster.told().splitlines()] if before is None else []
        return [ShowLine("\n".join([f"{plan.world_size} workers on {', '.join(plan.hosts)}{without}", *reasons]))]

    def _prepare_hosts(self, plan: WorldPlan) -> list[Action]:
        """Those that were not, or for another number of workers."""
        workers = {host: len(plan.on(host)) for host in plan.hosts}
        new = [host for host in plan.hosts if self._prepared.get(host) != workers[host]]
        self._prepared |= workers
        return [SendMessage(host, self._prepare(host, plan)) for host in new]

    def _too_few_hosts(self) -> str:
        if not self.retries.used:
            return self._roster.told()
        least, wait_s = self.request.scaling.min_workers, self.request.failure_config.host_wait_s
        slots = sum(host.slots or 0 for host in self._roster.present)
        when = f"within {wait_s:g} s" if wait_s else "at once"
        return (
            f"{self._roster.told()}\n"
            f"{', '.join(self._roster.lost)} did not come back {when} (FailureConfig.host_wait_s), and the other hosts "
            f"have {slots} slots for {least} workers. Mend it, or give the run spare slots or num_workers=(min, max)"
        )

    def _prepare(self, host: str, plan: WorldPlan) -> wire.Prepare:
        request, order = self.request, self.request.hosts[host]
        return wire.Prepare(
            start_method=request.scaling.start_method if request.backend.may_fork else "spawn",
            preload=list(request.job.preload),
            environment=dict(order.environment),
            python_flags=request.python_flags,
            directory=order.directory,
            lease_s=order.lease_s,
            is_local=order.is_local,
            workers=len(plan.on(host)),
            body=request.job.blob,
        )

    def _reserve(self, now: float) -> list[Action]:
        """Begin a new attempt: a new rendezvous port each time, so that nobody meets the last attempt's peers."""
        assert self.plan is not None
        self._move(RunState.RESERVING)
        self.attempt += 1
        self._gone = set()
        self._ranks = {rank.rank: _Rank(plan=rank) for rank in self.plan.ranks}
        self.hung, self._votes = None, StopConsensus()
        self._storing = CheckpointsInProgress()
        self._deadline = now + CONNECT_TIMEOUT_S
        self._reserved = dict.fromkeys(self._ports_needed(self.plan))
        return [AttemptStarts(self.attempt, self.plan), *self._reservations(self.plan)]

    def _ports_needed(self, plan: WorldPlan) -> dict[str, int]:
        """On each host: one for each rank's endpoint, if there are any, and before them one for the rendezvous."""
        endpoints = self.request.backend.has_endpoints
        needed = {host: len(plan.on(host)) * endpoints + (host == plan.hosts[0]) for host in plan.hosts}
        return {host: ports for host, ports in needed.items() if ports}

    def _reservations(self, plan: WorldPlan) -> list[Action]:
        return [
            SendMessage(host, wire.ReservePorts(attempt=self.attempt, ports=ports, peer=plan.peer_of(host)))
            for host, ports in self._ports_needed(plan).items()
        ]

    def _on_reserved(self, host: str, message: wire.PortsReserved, now: float) -> list[Action]:
        if self.state is not RunState.RESERVING or message.attempt != self.attempt:
            return []
        self._reserved[host] = message
        reserved = {host: answer for host, answer in self._reserved.items() if answer is not None}
        if len(reserved) < len(self._reserved):
            return []
        assert self.plan is not None
        first = reserved[self.plan.hosts[0]]
        wanted = self._wanted().get("MASTER_ADDR")
        try:
            self._address = rendezvous_address(self.plan, wanted=wanted, found=first.address)
            if self.request.backend.has_endpoints:
                ports = {host: answer.ports[answer is first :] for host, answer in reserved.items()}
                found = {host: answer.address for host, answer in reserved.items()}
                self._endpoints = endpoints_of(self.plan, found, ports, wanted=wanted)
        except LaunchError as error:
            return self._give_up(str(error), now)
        self._move(RunState.STARTING)
        self._deadline = None
        started = [SendMessage(host, self._start_message(host, first.ports[0])) for host in self.plan.hosts]
        return [*self._say_restart(), *started]

    def _wanted(self) -> dict[str, str]:
        """Where the user wants the ranks to meet."""
        assert self.plan is not None
        given = self.request.hosts[self.plan.hosts[0]].environment
        return {name: given[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in given}

    def _say_restart(self) -> list[Action]:
        if not self.retries.used:
            return []
        resume = f"from {self.checkpoint}" if self.checkpoint else "from the beginning, as there is no checkpoint"
        return [ShowLine(f"restart {self.retries.used} ({self.retries.budget}) {resume}")]

    def _start_message(self, host: str, port: int) -> wire.Start:
        assert self.plan is not None
        specs = [asdict(self._spec(self.plan, rank, port)) for rank in self.plan.on(host)]
        rendezvous = "" if self.plan.shares_network else self._address
        return wire.Start(attempt=self.attempt, ranks=specs, rendezvous=rendezvous)

    def _spec(self, plan: WorldPlan, rank: RankPlan, port: int) -> wire.WorkerSpec:
        request, order, address = self.request, self.request.hosts[rank.host], self._address
        environment = rank_environment(
            plan,
            rank,
            address=address,
            port=port,
            run_id=request.run_id,
            attempt=self.attempt - request.first_attempt,
            max_restarts=max(request.failure_config.max_failures, 0),
        )
        return wire.WorkerSpec(
            attempt=self.attempt,
            rank=rank.rank,
            world_size=plan.world_size,
            local_rank=rank.local_rank,
            local_world_size=rank.local_world_size,
            node_rank=rank.node_rank,
            run_name=request.run_name,
            storage_path=request.storage_path,
            filesystem=request.filesystem,
            environment={
                **environment,
                **self._wanted(),
                **visible_devices(rank),
                **request.backend.environment(plan, rank, self._endpoints),
            },
            defaults={**rendezvous_network(plan), **RANK_DEFAULTS, **request.backend.defaults},
            devices=list(rank.devices),
            shares_gpu=plan.shares_gpu,
            run_id=request.run_id,
            metadata=dict(request.metadata),
            resources=request.scaling.worker_resources,
            checkpoint=self.checkpoint,
            validates=request.validator is not None,
            directory=order.directory,
            sys_path=list(order.sys_path),
            argv=request.argv,
        )

    def _on_rank(self, message: wire.Spawned | wire.Exited | wire.FromWorker, now: float) -> list[Action]:
        rank = self._ranks[message.rank]
        match message:
            case wire.Spawned():
                if rank.state is RankState.PLANNED:
                    self._move_rank(rank, RankState.SPAWNED)
            case wire.UsesShouldStop() | wire.StopVote():
                return self._on_listener(message, now)
            case wire.Running():
                rank.entered = self.retries.ever_entered = True
                self._move_rank(rank, RankState.RUNNING)
                return self._when_all_run()
            case wire.Outcome():
                rank.outcome = message
                self._move_rank(rank, RankState.DONE if message.ok else RankState.RAISED)
                ordered = self._ordered(self._votes.finished(message.rank))
                return [*ordered, *(self._when_all_done(now) if message.ok else self._rank_failed(rank, now))]
            case wire.Exited():
                rank.exited = message
                self._move_rank(rank, RankState.EXITED)
                return [] if rank.outcome is not None else self._rank_failed(rank, now)
        return []

    def _when_all_run(self) -> list[Action]:
        waiting = (RankState.PLANNED, RankState.SPAWNED)
        if self.state is RunState.STARTING and not any(rank.state in waiting for rank in self._ranks.values()):
            self._move(RunState.RUNNING)
        return []

    def _when_all_done(self, now: float) -> list[Action]:
        if len(self.outcomes) < len(self._ranks) or self.state not in (RunState.STARTING, RunState.RUNNING):
            return []
        self._move(RunState.RELEASING)
        self._deadline = now + EXIT_TIMEOUT_S
        return [
            SendMessage(rank.plan.host, wire.Release(attempt=self.attempt, rank=number))
            for number, rank in self._ranks.items()
            if rank.state is not RankState.EXITED
        ]

    # -- the way down ---------------------------------------------------------------------------------------------

    def _rank_failed(self, rank: _Rank, now: float) -> list[Action]:
        if rank.failed_order is None:
            self._order += 1
            rank.failed_order = self._order
        return [] if self.state is RunState.STOPPING else self._attempt_failed(now)

    def _attempt_failed(self, now: float) -> list[Action]:
        """End the attempt after its first failure. That is done at once, unless other ranks are just storing a
        checkpoint that can be committed without the ranks that have failed, or are due to bring it.
        """
        if self._storing == CheckpointsInProgress():
            return self._stop_failed(now)
        self._move(RunState.STOPPING)
        self.waits_for_checkpoint, self._checkpoint_limit = True, now + STORING_TIMEOUT_S
        self._deadline = self._checkpoint_deadline(now)
        failed, storing = self.failed_ranks, {rank for rank, _ in self._storing.parts}
        awaited = storing or self._storing.expected
        verb = ("are" if len(awaited) > 1 else "is") + (" storing" if storing else " due to report")
        return [
            ShowLine(
                f"{_ranks(failed)} failed; waiting up to {self._deadline - now:g} s for the checkpoint that "
                f"{_ranks(awaited)} {verb}"
            )
        ]

    def _on_storing(self, storing: CheckpointsInProgress, now: float) -> list[Action]:
        """While the attempt waits for checkpoints, it does not begin to wait for later ones."""
        before, self._storing = self._storing, storing
        if not self.waits_for_checkpoint:
            return []
        parts = {part for part in storing.parts if part in before.parts or part[0] in before.expected}
        self._storing = CheckpointsInProgress(frozenset(parts), before.expected & storing.expected)
        if self._storing == CheckpointsInProgress():
            return self._stop_failed(now)
        if self._storing != before:
            self._deadline = self._checkpoint_deadline(now)
        return []

    def _checkpoint_deadline(self, now: float) -> float:
        limit = self._checkpoint_limit
        return limit if self._storing.parts else min(limit, now + EXPECTED_TIMEOUT_S)

    def _wait_no_more(self, now: float) -> list[Action]:
        return self._stop_failed(now) if self.waits_for_checkpoint else []

    def _stop_failed(self, now: float) -> list[Action]:
        """Stop the ranks after a failure. There is no settling time beyond that of taking stacks, which the agents use
        up if the failure is the consequence of another one that has not arrived yet.
        """
        return self._stop(0.0, now, culprit_known=any(not failure.consequence for failure in self.failures))

    def _on_stop_asked(self, why: str, now: float) -> list[Action]:
        if self.state is RunState.STOPPING and self.stop_reason is None and self.failures:
            self._retry_forbidden = True  # it has failed already, and that is what the user should hear
            return self._wait_no_more(now)
        again = self.stop_reason is not None
        self.stop_reason = self.stop_reason or why
        if not self.attempt_is_on:
            self._end(RunState.ABORTED)
            return []
        if again or self.state is RunState.STOPPING:
            return self._stop(0.0, now)
        grace_s = self.request.stop_grace_s
        if self._votes.listeners and grace_s:
            self._deadline = now + grace_s
            said = f"{why}: stopping the workers; should_stop() is true, SIGTERM follows after {grace_s:g} s at most"
            return [
                ShowLine(f"{said}; again to kill them at once"),
                *self._tell_ranks(self._votes.ask(), wire.AnnounceStop),
            ]
        said = f"{why}: stopping the workers, {grace_s:g} s at most; again to kill them at once"
        return [ShowLine(said), *self._stop(grace_s, now)]

    def _on_listener(self, message: wire.UsesShouldStop | wire.StopVote, now: float) -> list[Action]:
        """A rank calls should_stop(), or waits in it to hear where all stop."""
        if isinstance(message, wire.StopVote):
            return self._ordered(self._votes.vote(message.rank, message.call, now))
        return self._tell_ranks(self._votes.listen(message.rank), wire.AnnounceStop)

    def _ordered(self, orders: Iterable[Order]) -> list[Action]:
        told = (self._tell_ranks(o.ranks, wire.StopAtReport, call=o.call, final=o.final) for o in orders)
        return [action for actions in told for action in actions]

    def _tell_ranks(self, ranks: Iterable[int], kind: type[wire.ToWorker], **fields: Any) -> list[Action]:
        return [
            SendMessage(self._ranks[rank].plan.host, kind(attempt=self.attempt, rank=rank, **fields))
            for rank in sorted(ranks)
        ]

    def _stop(self, grace_s: float, now: float, *, culprit_known: bool = True) -> list[Action]:
        assert self.plan is not None
        if self.waits_for_checkpoint:
            self.waits_for_checkpoint, self._deadline = False, None
        latest = self._deadline if self.state is RunState.STOPPING and self._deadline is not None else math.inf
        if self.state is not RunState.STOPPING:
            self._move(RunState.STOPPING)
        hosts = [host for host in self.plan.hosts if not self._roster.is_gone(host)]
        if not hosts:
            return self._all_gone(now)
        self._deadline = min(latest, now + grace_s + self._stop_timeout_s(hosts))
        stop = wire.Stop(attempt=self.attempt, grace_s=grace_s, culprit_known=culprit_known)
        return [SendMessage(host, stop) for host in hosts]

    def _stop_timeout_s(self, hosts: Iterable[str]) -> float:
        """A host that is silent is lost when its lease has run out, which another attempt may be able to do without."""
        if self.was_asked_to_stop:
            return STOP_TIMEOUT_S
        orders = [self.request.hosts[host] for host in hosts]
        return max([STOP_TIMEOUT_S, *(order.lease_s + LEASE_MARGIN_S for order in orders if not order.is_local)])

    def _on_gone(self, host: str, message: wire.HostIdle, now: float) -> list[Action]:
        if not self.attempt_is_on:  # said twice: once as its workers had ended, and once as it was told to stop
            return []
        self._gone.add(host)
        assert self.plan is not None
        return [] if self.occupied else self._all_gone(now)

    def _all_gone(self, now: float) -> list[Action]:
        """Nothing of the attempt is left anywhere: finish, give up, or try again."""
        self._deadline, self.waits_for_checkpoint = None, False
        finished = self.is_done and not self.storage_failed
        why = None if finished else self._why_it_ended()
        ended: list[Action] = [AttemptEnded(self.attempt, tuple(self.failures), why)]
        if finished:
            self._end(RunState.FINISHED)  # also when asked to stop in the last moment
        elif self.stop_reason is not None:
            self._end(RunState.ABORTED)
        elif self._may_retry():
            what_failed = self._what_failed()
            self.earlier.append(f"attempt {self.attempt} before: {what_failed.splitlines()[0]}")
            return [*ended, ShowLine(what_failed), *self._retry(now)]
        else:
            self.problem = self.problem or self._loss()
            self._end(RunState.FAILED)
        return ended

    def _why_it_ended(self) -> str | None:
        """Early, and not by the failure of a rank."""
        if self.stop_reason is not None:
            return f"stopped by {self.stop_reason}"
        if self.hung is not None and not self.failures:
            return self._what_failed()
        return self.problem

    def _loss(self) -> str | None:
        """What a run ends with that has lost a host, and is not restarted."""
        assert self.plan is not None
        told = self._roster.told(self.plan.hosts)
        if not told or self.request.failure_config.max_failures:
            return told or None
        return (
            f"{told}\nFailureConfig(max_failures=1) lets a run go on once: on spare slots, on fewer hosts with "
            "num_workers=(min, max), or when the host is back"
        )

    def _what_failed(self) -> str:
        if not self.failures:
            assert self.hung is not None
            return "\n    ".join([f"no rank has made progress for {self.hung.after_s:g} s", *self.hung.where])
        culprit = culprit_first(self.failures)[0]
        if culprit.lost:
            lost = [failure for failure in self.failures if failure.lost]
            ranks = {(f.host, f.summary): rank_list(g.rank for g in lost if g.host == f.host) for f in lost}
            return "; ".join(f"rank(s) {of} on {host} were {summary}" for (host, summary), of in ranks.items())
        return f"rank {culprit.rank} failed on {culprit.host}: {culprit.summary}"

    def _may_retry(self) -> bool:
        if self.problem or self._retry_forbidden:
            return False
        culprit = culprit_first(self.failures)[0] if self.failures else None
        reports = self._ranks[culprit.rank].reports if culprit else 0
        return self.retries.allow(culprit, reports=reports, checkpoint=self.checkpoint)

    def _retry(self, now: float) -> list[Action]:
        delay_s = self.retries.delay_s()
        if not delay_s:
            return self._next_attempt(now)
        self._move(RunState.WAITING)
        self._deadline = now + delay_s
        return [ShowLine(f"the next attempt starts in {delay_s:g} s")]

    def _next_attempt(self, now: float) -> list[Action]:
        before = set(self._roster.lost)
        self._roster.begin(now, wait_s=self.request.failure_config.host_wait_s, patience_s=LOST_HOST_GRACE_S)
        actions = self._muster(now)
        asked = [action.host for action in actions if isinstance(action, ConnectHost)]
        waits = [f"trying to reach {', '.join(asked)}" + " again" * (before >= set(asked))] if asked else []
        return [*(ShowLine(text) for text in waits), *actions]

    def _on_host_failed(self, host: str, text: str, now: float) -> list[Action]:
        self.problem = self.problem or f"{host}: {text}"
        return self._stop_or_give_up(self.problem, now)

    def _stop_or_give_up(self, problem: str, now: float) -> list[Action]:
        if self.state is RunState.STOPPING:
            return self._wait_no_more(now)
        if self.attempt_is_on:
            return self._stop(0.0, now)
        if self.state in (RunState.CONNECTING, RunState.WAITING):
            self._forget_attempt()
        return self._give_up(problem, now)

    def _on_host_lost(self, lost: HostLost, now: float) -> list[Action]:
        host, why = lost.host, lost.why
        if self._roster.is_gone(host):
            return []
        self._roster.went(host, why, now)
        self._prepared.pop(host, None)
        if self.state is RunState.CONNECTING:
            return self._muster(now)
        if self.state is RunState.WAITING or self.plan is None or host not in self.plan.hosts:
            return []
        if self.state is RunState.RELEASING and len(self.outcomes) == len(self._ranks) and not lost.owes:
            return self._on_gone(host, wire.HostIdle(attempt=self.attempt), now)
        self._lose_ranks(lost)
        if self.state is RunState.RESERVING and not self.retries.ever_entered:
            return self._give_up(self._roster.told(), now)
        if self.state is RunState.STOPPING:
            return self._on_gone(host, wire.HostIdle(attempt=self.attempt), now)
        if not lost.owes and all(rank.rank in self.outcomes for rank in self.plan.on(host)):
            return [ShowLine(f"{host}: its ranks had done their work, and the others go on without it: {why}")]
        return self._attempt_failed(now)

    def _lose_ranks(self, lost: HostLost) -> None:
        """A rank that had done its work is lost, too, if that is not safe, and the attempt has not failed yet."""
        is_unsafe = lost.owes and self.state is not RunState.STOPPING
        for number, rank in self._ranks.items():
            had_done = rank.outcome is not None and rank.outcome.ok
            if rank.plan.host != lost.host or (rank.exited is not None and not (had_done and is_unsafe)):
                continue
            if rank.exited is None:
                self._move_rank(rank, RankState.EXITED)
            rank.exited = wire.Exited(attempt=self.attempt, rank=number, lost=lost.why)
            if had_done and is_unsafe:
                rank.outcome = None
            if rank.outcome is None and rank.failed_order is None:
                self._order += 1
                rank.failed_order = self._order

    def _on_tick(self, now: float) -> list[Action]:
        ordered = self._ordered(self._votes.tick(now))
        if self._deadline is None or now < self._deadline:
            return ordered
        self._deadline = None
        match self.state:
            case RunState.CONNECTING:
                return self._muster(now)
            case RunState.WAITING:
                return self._next_attempt(now)
            case RunState.STARTING | RunState.RUNNING:  # ranks were asked to stop, and the grace is over
                return self._stop(TERM_GRACE_S, now)
            case RunState.RESERVING:
                assert self.plan is not None
                return self._give_up(
                    f"{self.plan.hosts[0]}: no port for the rendezvous within {CONNECT_TIMEOUT_S:g} s", now
                )
            case RunState.RELEASING:
                late = rank_list(n for n, rank in self._ranks.items() if rank.state is not RankState.EXITED)
                text = f"rank(s) {late or 'none'} had finished, but did not leave within {EXIT_TIMEOUT_S:g} s; killed"
                return [ShowLine(text), *self._stop(0.0, now)]
            case _ if self.waits_for_checkpoint:
                return self._stop_failed(now)
            case _:
                text = f"{', '.join(self.occupied)}: processes could not be ended in time"
                return [ShowLine(text), *self._all_gone(now)] if self.is_done else self._give_up(text, now)

    def _give_up(self, problem: str, now: float) -> list[Action]:
        self.problem = self.problem or problem
        self._end(RunState.FAILED)
        return []

    # -- moves ----------------------------------------------------------------------------------------------------

    def _end(self, state: RunState) -> None:
        self._deadline = None
        self._move(state)

    def _move(self, new: RunState) -> None:
        self.story.append(f"attempt {self.attempt}: {self.state.name} -> {new.name}")
        if new not in RUN_MOVES[self.state]:
            raise InvalidTransition("\n".join(["illegal move of the run", *self.story]))
        self.state = new

    def _move_rank(self, rank: _Rank, new: RankState) -> None:
        self.story.append(f"attempt {self.attempt}, rank {rank.plan.rank}: {rank.state.name} -> {new.name}")
        if new not in RANK_MOVES[rank.state]:
            raise InvalidTransition("\n".join(["illegal move of a rank", *self.story]))
        rank.state = new

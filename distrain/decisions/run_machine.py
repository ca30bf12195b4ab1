"""The run as a state machine: ``RunStateMachine.handle(event, now) -> [Action]``. Runs in: coordinator.

Pure: no I/O, no clock, no threads. The coordinator turns what it hears into events, and carries out the actions that
the machine returns. Only the machine changes the states of the run and of its ranks; :mod:`distrain.decisions.states`
explains them. The sections below follow the life of an attempt: hosts connect, ports are reserved, ranks train; ranks
or hosts fail, or the user asks the run to stop; the attempt ends, and the run ends or is restarted.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distrain import wire
from distrain.decisions.blame import RunSummary, culprit_first, finished_early
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
    HostSlow,
    MessageReceived,
    Outstanding,
    RollBack,
    RolledBack,
    RunRequest,
    SendMessage,
    ShowLine,
    StopRequested,
    StorageFailed,
    Tick,
    WorkersStart,
)
from distrain.decisions.host_pool import HOST_ANSWER_TIMEOUT_S, HostPool, Readiness, info_of
from distrain.decisions.placement import Rendezvous, endpoints_of, fields_of, make_plan, rendezvous_address, worker_spec
from distrain.decisions.ranks import Rank, Ranks
from distrain.decisions.retries import RetryPolicy, start_without_checkpoint
from distrain.decisions.states import RANK_MOVES, RUN_MOVES, RankState, RunState
from distrain.decisions.stop_consensus import StopConsensus
from distrain.errors import InvalidTransition, LaunchError, ResourcesError
from distrain.system.stacks import raised_at
from distrain.system.text import BY_COMMAND, count, name_hosts, name_ranks, on_host, signal_of, stopped_by

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distrain.errors import RankFailure
    from distrain.hosts.world import WorldPlan

LOST_HOST_GRACE_S = 10.0
"""Seconds to wait for lost hosts before restarting without them. Equals ssh's connect timeout."""
STOP_TIMEOUT_S = 10.0
"""Seconds, beyond the grace, to wait for hosts to end all processes of an attempt before the run gives them up."""
EXIT_TIMEOUT_S = 600.0
"""Seconds to wait for exit handlers of ranks that have finished train_func, before the run fails. Scripts have more."""
LEASE_MARGIN_S = 2.0
"""Seconds between the expiry of a silent host's lease and the moment when the coordinator surely knows of it."""
TERM_GRACE_S = 2.0
"""Seconds to SIGKILL for ranks that get a signal after others were in vain: should_stop(), or another signal."""
FIRST_PROGRESS_S = 5.0
"""Seconds to wait for hosts before a line names those that have not answered. The time doubles with every line."""
CHECKPOINT_GRACE_S = 30.0
"""Seconds to wait, after a failure, for other ranks to store a checkpoint before they are stopped."""
UPLOAD_PATIENCE_S = 300.0
"""Seconds that an attempt with unfinished work waits at its end for uploads that complete a checkpoint."""
NOTICE_AFTER_S = 5.0
"""Seconds to wait for checkpoints before a line on the console says so."""
_CROWD = 8
"""Workers for each CPU of a host from which on a warning says that this is slow."""
_STORY_LENGTH = 200
"""Number of moves that InvalidTransition shows."""
_EARLIER_KEPT = 5
"""Number of earlier attempts that an error shows."""


class RunStateMachine:
    """One run, from the first HELLO to its end."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self.state = RunState.CONNECTING
        self.attempt = request.first_attempt - 1
        self.checkpoint = request.checkpoint
        """Path or URL of the latest checkpoint, from which the next attempt starts."""
        self.stop_reason: str | None = None
        """Why the user asked the run to stop."""
        self.problem: str | None = None
        """Why the run cannot continue, if no rank is to blame."""
        self.resources_missing = False
        self.storage_failed = False
        self.plan: WorldPlan | None = None
        """The plan of the latest attempt."""
        self.story: deque[str] = deque(maxlen=_STORY_LENGTH)
        """The latest moves of the run and its ranks, for InvalidTransition."""
        self.retries = RetryPolicy(request.failure_config, is_script=request.is_script)
        self.hung: HangDetected | None = None
        """The hang that ended the latest attempt."""
        self._replaced: dict[int, HostSlow] = {}
        """By attempt that was ended for it: the slow host whose place another one takes."""
        self._rollbacks: dict[int, RollBack] = {}
        """By attempt that was ended for it."""
        self._skips = dict(request.skips)
        self.earlier_attempts: deque[str] = deque(maxlen=_EARLIER_KEPT)
        """One line for each earlier attempt, with its failure."""
        slots = {name: settings.slots for name, settings in request.hosts.items()}
        self._host_pool = HostPool(slots, request.scaling)
        self._prepared: dict[str, int] = {}
        """The hosts that know the job, and for how many workers they are prepared."""
        self._ranks = Ranks()
        self._port_answers: dict[str, wire.RendezvousPorts] = {}
        self._awaited_ports: dict[str, int] = {}
        """How many ports each host has to reserve that has not answered yet."""
        self._busy_hosts: dict[str, None] = {}
        self._signalled_hosts: set[str] = set()
        """The hosts whose ranks were told to end by a signal, and may do so by themselves."""
        self._last_grace_s = 0.0
        self._grace_is_over = False
        self._retry_forbidden = False
        self._stop_consensus = StopConsensus(self.attempt)
        self._saving: CheckpointsInProgress | None = None
        """The checkpoints that SAVING waits for; None until they are known."""
        self._stop_by = math.inf
        """Until when ranks may save because the user wants the run to stop."""
        self._waits_since = math.inf
        """When the wait of PREPARING, SAVING or SETTLING began."""
        self._has_announced_wait = False
        self._deadline: float | None = None
        self._progress_due = math.inf
        self._progress_interval_s = FIRST_PROGRESS_S

    # -- the state of the run -------------------------------------------------------------------------------------

    def summary(self, errors: Mapping[int, BaseException] | None = None) -> RunSummary:
        """Return the summary of the run. ``errors``: exceptions by rank, if they were raised in this process."""
        return RunSummary(
            state=self.state,
            attempt=self.attempt,
            value=self.outcomes[0].body if self.is_done else None,
            failures=self.failures,
            errors=errors or {},
            stopped_ranks=self.stopped_ranks,
            stop_reason=self.stop_reason,
            grace_is_over=self._grace_is_over,
            problem=self.problem,
            hung=self.hung,
            no_retry=self.retries.refusal,
            hosts=[rank.host for rank in self.plan.ranks] if self.plan else (),
            finished=sorted(self.outcomes),
            storage_failed=self.storage_failed,
            resources_missing=self.resources_missing,
            entered=self.retries.ever_entered,
            earlier_attempts=list(self.earlier_attempts),
        )

    @property
    def failures(self) -> list[RankFailure]:
        """The failures of the latest attempt, in order of arrival. One that was ended on purpose has none."""
        return [] if self.attempt in self._replaced or self.attempt in self._rollbacks else self._ranks.failures()

    @property
    def outcomes(self) -> Mapping[int, wire.Outcome]:
        """The good outcomes of the latest attempt, by rank."""
        return self._ranks.outcomes

    @property
    def is_done(self) -> bool:
        """True if every rank of the latest attempt has finished all its work, even if that is not stored yet."""
        return self._ranks.all_work_is_done

    @property
    def failed_ranks(self) -> set[int]:
        """The ranks of the latest attempt that have failed, were lost, or were stopped."""
        return {rank.plan.rank for rank in self._ranks.failed}

    @property
    def stopped_ranks(self) -> list[int]:
        """The ranks of the latest attempt that distrain stopped."""
        others = {failure.rank for failure in self.failures} | self.outcomes.keys()
        return [number for number in range(len(self._ranks.all)) if number not in others]

    @property
    def was_asked_to_stop(self) -> bool:
        """True if the user has asked the run to stop, even if it ends because it had failed before."""
        return self.stop_reason is not None or self._retry_forbidden

    @property
    def living_hosts(self) -> list[str]:
        """The hosts of the attempt, without those that were lost after all of their ranks had finished."""
        return [host for host in (self.plan.hosts if self.plan else ()) if not self._host_pool.is_lost(host)]

    @property
    def saves_on_stop(self) -> bool:
        """True if ranks that should stop learn it from should_stop() first, and can save a checkpoint."""
        return bool(self._stop_consensus.callers and self.request.stop_grace_s)

    @property
    def attempt_is_active(self) -> bool:
        """True if there may be processes of the latest attempt."""
        working = (RunState.STARTING, RunState.RUNNING, RunState.RELEASING)
        return self.state in working or self.state.has_ended_early

    @property
    def busy_hosts(self) -> Collection[str]:
        """The hosts that may have processes of the attempt, and can still send a message about them."""
        return self._busy_hosts if self.attempt_is_active else ()

    def has_succeeded(self, end: wire.Exited) -> bool:
        """Return whether a rank has done its work that has sent no outcome: a script may end by its exit code alone."""
        return self.request.is_script and end.exit_code == 0 and self._ranks[end.rank].state is RankState.RUNNING

    def deadline(self) -> float | None:
        """Return when the machine needs a :class:`Tick`."""
        moments = (self._deadline, self._stop_consensus.deadline)
        return min((moment for moment in moments if moment is not None), default=None)

    # -- events ---------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """Begin the run. Must be called once, before any event."""
        return self._search_hosts(now, reconnect_s=0.0, wait_s=HOST_ANSWER_TIMEOUT_S)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Return what to do about ``event``. Raise InvalidTransition, with the story, if it is impossible now.

        The end of a run is final, except that a finished run fails if its last report cannot be stored after all.
        """
        if self.state.is_terminal and not (self.state is RunState.FINISHED and isinstance(event, StorageFailed)):
            return []
        match event:
            case MessageReceived(host, message, reports, reason):
                if isinstance(message, (wire.Outcome, wire.Exited)) and message.attempt == self.attempt:
                    self._ranks[message.rank].reports = reports
                    self._ranks[message.rank].reason = reason
                return self._on_message(host, message, now)
            case HangDetected():
                return self._on_hang(event, now)
            case HostLost():
                return self._on_host_lost(event, now)
            case HostSlow():
                return self._on_host_slow(event, now)
            case RolledBack():
                return self._on_rolled_back(event, now)
            case StopRequested(why):
                return self._on_stop_requested(why, now)
            case StorageFailed(why):
                self.storage_failed = True
                return self._on_problem(why, now)
            case CheckpointAvailable(path):
                self.checkpoint = path
                return []
            case Outstanding():
                return self._on_outstanding(event, now)
            case Tick():
                return self._on_tick(now)

    def _on_message(self, host: str, message: wire.Message, now: float) -> list[Action]:
        match message:
            case wire.Hello():
                return self._on_hello(host, message, now)
            case wire.RendezvousPorts():
                return self._on_ports_reserved(host, message, now)
            case wire.HostFailed():
                return self._on_problem(f"{host}: {message.text}", now)
            case wire.Notice():
                return [ShowLine(f"{host}: {message.text}", once=True)]
            case wire.StacksDone():
                self._on_last_stacks(host)
                return []
            case wire.HostIdle():
                return self._on_host_idle(host, now) if message.attempt == self.attempt else []
            case wire.Exited() | wire.FromWorker():
                return self._on_rank_message(message, now) if message.attempt == self.attempt else []
            case _:
                return []

    def _on_tick(self, now: float) -> list[Action]:
        orders = self._send_stop_orders(self._stop_consensus.tick(now))
        if self._deadline is None or now < self._deadline:
            return orders
        self._deadline = None
        match self.state:
            case RunState.CONNECTING:
                return self._try_start_attempt(now)
            case RunState.WAITING:
                return self._begin_next_attempt(now)
            case RunState.STARTING | RunState.RUNNING:  # should_stop() is true, and the grace is over
                return self._pass_signal_on(TERM_GRACE_S, now)
            case RunState.RESERVING:
                return self._give_up(
                    f"{name_hosts(self._awaited_ports)}: no ports were reserved within {HOST_ANSWER_TIMEOUT_S:g} s"
                )
            case RunState.PREPARING | RunState.SETTLING:
                return []  # what is outstanding decides
            case RunState.RELEASING:
                return self._on_late_exits(now)
            case RunState.SAVING:
                return self._stop_after_failure(now)
            case _:
                text = f"{name_hosts(self.busy_hosts)}: processes could not be ended within the time limit"
                return [ShowLine(text), *self._settle(now)] if self.is_done else self._give_up(text)

    def _on_late_exits(self, now: float) -> list[Action]:
        """End the run because of ranks that do not exit: what their exit handlers do, such as an upload, is cut off."""
        late = [rank for rank in self._ranks.all if rank.exited is None]
        for rank in late:
            self._ranks.drop_outcome(rank)
        who = name_ranks([rank.plan.rank for rank in late]) if late else "child processes of the ranks"
        text = f"{who} did not exit within {EXIT_TIMEOUT_S:g} s after all ranks had finished; killed"
        return self._on_problem(text, now) if late else [ShowLine(text), *self._stop(0.0, now)]

    # -- hosts connect --------------------------------------------------------------------------------------------

    def _on_hello(self, host: str, hello: wire.Hello, now: float) -> list[Action]:
        self._host_pool.mark_connected(host, info_of(host, hello, self.request.hosts[host]))
        return self._try_start_attempt(now) if self.state is RunState.CONNECTING else []

    def _search_hosts(self, now: float, *, reconnect_s: float, wait_s: float) -> list[Action]:
        self._host_pool.begin_search(now, reconnect_s=reconnect_s, wait_s=wait_s)
        self._progress_interval_s = FIRST_PROGRESS_S
        self._progress_due = now + FIRST_PROGRESS_S
        return self._try_start_attempt(now)

    def _try_start_attempt(self, now: float) -> list[Action]:
        """Begin the next attempt if there are hosts for it. Otherwise connect further hosts and wait, or give up."""
        connecting: list[Action] = [ConnectHost(host) for host in self._host_pool.hosts_to_connect(now)]
        readiness = self._host_pool.readiness(now)
        if readiness is Readiness.READY:
            return [*connecting, *self._plan_attempt(now)]
        if self.state is not RunState.CONNECTING:
            self._move(RunState.CONNECTING)
        if readiness is Readiness.HOPELESS:
            self._forget_attempt()
            return self._give_up(self._describe_missing_hosts())
        progress = self._describe_progress(now)
        self._deadline = min(self._host_pool.deadline(), self._progress_due)
        return [*progress, *connecting]

    def _describe_progress(self, now: float) -> list[Action]:
        """Say which hosts the run waits for, more and more rarely."""
        if now < self._progress_due:
            return []
        self._progress_interval_s *= 2
        self._progress_due = now + self._progress_interval_s
        text = self._host_pool.describe_progress()
        return [ShowLine(text)] if text else []

    def _describe_missing_hosts(self) -> str:
        losses = self._host_pool.describe_losses()
        if not self.retries.used:
            return losses
        least, wait_s = self.request.scaling.min_workers, self.request.failure_config.host_wait_s
        slots = sum(host.slots or 0 for host in self._host_pool.connected)
        when = f"within {wait_s:g} s" if wait_s else "at once"
        lost = name_hosts(self._host_pool.losses)
        return (
            f"{losses}\n"
            f"{lost} did not come back {when} (FailureConfig.host_wait_s), and the other hosts have {slots} slots for "
            f"{least} workers. Repair {lost}, or give the run spare slots or num_workers=(min, max)"
        )

    def _plan_attempt(self, now: float) -> list[Action]:
        before = self.plan
        try:
            self.plan = self.request.plan or make_plan(self._host_pool.connected, self.request.scaling)
        except ResourcesError as error:
            self.resources_missing = True
            self._forget_attempt()
            return self._give_up(str(error))
        shown = [*self._describe_change(before, self.plan), *self._describe_crowds(self.plan)]
        return [*shown, *self._prepare_hosts(self.plan), *self._begin_attempt(self.plan, now)]

    def _forget_attempt(self) -> None:
        """Drop the facts of the latest attempt: the run does not end because of what its ranks did."""
        self._ranks, self.hung = Ranks(), None

    def _describe_change(self, before: WorldPlan | None, plan: WorldPlan) -> list[Action]:
        """Show how the plan differs from that of the attempt before, or from what the user expects."""
        expected = (before.hosts, before.world_size) if before else (plan.hosts, self.request.scaling.max_workers)
        missing = dict.fromkeys([*self._host_pool.losses, *self._host_pool.slow])  # a lost one may be slow to return
        if (plan.hosts, plan.world_size) == expected and not (before is None and missing):
            return []
        without = f", without {name_hosts(missing)}" if missing else ""
        reasons = [f"    {line}" for line in self._host_pool.describe_losses().splitlines()] if before is None else []
        return [ShowLine("\n".join([f"{plan.world_size} workers on {name_hosts(plan.hosts)}{without}", *reasons]))]

    def _describe_crowds(self, plan: WorldPlan) -> list[Action]:
        """Warn of hosts with far more workers than CPUs."""
        return [
            ShowLine(f"{host.name}: {workers} workers share {count(host.cpus, 'CPU')}; fewer train faster", once=True)
            for host in self._host_pool.connected
            if (workers := len(plan.on(host.name))) > _CROWD * host.cpus
        ]

    def _prepare_hosts(self, plan: WorldPlan) -> list[Action]:
        """Send the job to hosts that do not have it, or are prepared for another number of workers."""
        workers = {host: len(plan.on(host)) for host in plan.hosts}
        new = [host for host in plan.hosts if self._prepared.get(host) != workers[host]]
        self._prepared |= workers
        orders: list[Action] = []
        latest: wire.Prepare | None = None
        for host in new:
            message = self._prepare_message(host, workers[host])
            latest = latest if message == latest else message  # equal ones are encoded once
            orders.append(SendMessage(host, latest))
        return orders

    def _prepare_message(self, host: str, workers: int) -> wire.Prepare:
        """Return the job, and how workers start: forked if user and framework allow it, else as new programs."""
        request, settings = self.request, self.request.hosts[host]
        return wire.Prepare(
            start_method=request.scaling.start_method if request.backend.may_fork else "spawn",
            preload=list(request.job.preload),
            environment=dict(settings.environment),
            python_flags=request.python_flags,
            directory=settings.directory,
            lease_s=settings.lease_s,
            is_local=settings.is_local,
            workers=workers,
            body=request.job.blob,
            numa_binding=request.scaling.numa_binding or "",
            gpus_per_worker=request.scaling.gpus_per_worker,
        )

    # -- an attempt begins: ports are reserved, hosts get their files, workers start --------------------------------

    def _begin_attempt(self, plan: WorldPlan, now: float) -> list[Action]:
        """Begin an attempt. It reserves new ports, so that no rank can connect to a process of an earlier attempt."""
        self._move(RunState.RESERVING)
        self.attempt += 1
        self._ranks = Ranks(plan)
        self._busy_hosts = dict.fromkeys(plan.hosts)
        self._signalled_hosts = set()
        self.hung, self._stop_consensus = None, StopConsensus(self.attempt)
        self._deadline = now + HOST_ANSWER_TIMEOUT_S
        self._port_answers, self._awaited_ports = {}, self._ports_needed(plan)
        return [
            AttemptStarts(self.attempt, plan),
            *(
                SendMessage(host, wire.ReservePorts(attempt=self.attempt, ports=ports, peer=plan.peer_of(host)))
                for host, ports in self._awaited_ports.items()
            ),
        ]

    def _ports_needed(self, plan: WorldPlan) -> dict[str, int]:
        """Count the ports of each host: on rank 0's host one for the rendezvous, then one for each endpoint, if any."""
        endpoints = self.request.backend.has_endpoints
        needed = {host: len(plan.on(host)) * endpoints + (host == plan.hosts[0]) for host in plan.hosts}
        return {host: ports for host, ports in needed.items() if ports}

    def _on_ports_reserved(self, host: str, message: wire.RendezvousPorts, now: float) -> list[Action]:
        if self.state is not RunState.RESERVING or message.attempt != self.attempt:
            return []
        self._port_answers[host] = message
        self._awaited_ports.pop(host, None)
        if not self._awaited_ports:
            self._begin_wait(RunState.PREPARING, now)
        return []

    def _start_workers(self) -> list[Action]:
        assert self.plan is not None
        try:
            rendezvous = self._rendezvous(self.plan, self._port_answers)
        except LaunchError as error:
            return self._give_up(str(error))
        self._move(RunState.STARTING)
        self._deadline, self.retries.started_from = None, self.checkpoint
        starts = [SendMessage(host, self._start_message(self.plan, host, rendezvous)) for host in self.plan.hosts]
        return [*self._describe_restart(), *starts, WorkersStart(self.plan)]

    def _rendezvous(self, plan: WorldPlan, answers: Mapping[str, wire.RendezvousPorts]) -> Rendezvous:
        """Return where the ranks connect to each other. Raise LaunchError if hosts cannot reach each other."""
        first = answers[plan.hosts[0]]
        given = self.request.hosts[plan.hosts[0]].environment.get("MASTER_ADDR")
        address = rendezvous_address(plan, wanted=given, found=first.address)
        endpoints: list[str] = []
        if self.request.backend.has_endpoints:
            ports = {host: answer.ports[answer is first :] for host, answer in answers.items()}
            found = {host: answer.address for host, answer in answers.items()}
            endpoints = endpoints_of(plan, found, ports, wanted=given)
        return Rendezvous(address=address, port=first.ports[0], endpoints=endpoints)

    def _start_message(self, plan: WorldPlan, host: str, rendezvous: Rendezvous) -> wire.Start:
        specs = [
            worker_spec(
                self.request,
                plan,
                rank,
                attempt=self.attempt,
                checkpoint=self.checkpoint,
                skip_to=self._skips.get(self.checkpoint or "", {}),
                rendezvous=rendezvous,
            )
            for rank in plan.on(host)
        ]
        address = "" if plan.shares_network else rendezvous.address
        ranks = [fields_of(spec) for spec in specs]
        return wire.Start(attempt=self.attempt, ranks=ranks, rendezvous=address)

    def _describe_restart(self) -> list[Action]:
        if not self.retries.used or self.attempt - 1 in self._replaced or self.attempt - 1 in self._rollbacks:
            return []
        return [ShowLine(f"{self.retries}, from {self._name_start()}")]

    @property
    def _run_directory(self) -> str:
        return f"{self.request.storage_path}/{self.request.run_name}"

    def _name_checkpoint(self) -> str:
        """Return the name of the checkpoint to start from; its path, if it is not one of this run."""
        return (self.checkpoint or "").removeprefix(f"{self._run_directory}/")

    def _name_start(self) -> str:
        """Return where ranks begin, in words that follow ``from``."""
        return self._name_checkpoint() or start_without_checkpoint(is_script=self.request.is_script)

    # -- ranks train ----------------------------------------------------------------------------------------------

    def _on_rank_message(self, message: wire.Exited | wire.FromWorker, now: float) -> list[Action]:
        rank = self._ranks[message.rank]
        was_told = rank.plan.host in self._signalled_hosts
        worked = not self._ranks.none_works
        match message:
            case wire.StopVote():
                return self._send_stop_orders(self._stop_consensus.vote(message.rank, message.call, now))
            case wire.Running():
                rank.when, self.retries.ever_entered = "during training", True
                self._move_rank(rank, RankState.RUNNING)
                if self.state is RunState.STARTING and self._ranks.all_started:
                    self._move(RunState.RUNNING)
            case wire.Outcome():
                if not (was_told and (message.ok or message.exits)):  # else it ends because it was told to
                    self._ranks.set_outcome(rank, message)
                    rank.was_told = was_told and self.stop_reason is None
                self._move_rank(rank, RankState.DONE if message.ok else RankState.RAISED)
                orders = self._send_stop_orders(self._stop_consensus.mark_finished(message.rank))
                orders += self._release_stopped(is_last=worked)
                if message.rollback is not None:
                    return [*orders, *self._on_rollback(rank, message.rollback, now)]
                return [*orders, *(self._check_all_done(now) if message.ok else self._on_rank_failed(rank, now))]
            case wire.Exited():
                # Before the attempt is stopped, even a signal that distrain sent is a failure: a run says why it ends.
                by_us = self.state is RunState.STOPPING and (message.by_us or (was_told and message.lost is None))
                rank.exited = replace(message, by_us=by_us)
                self._move_rank(rank, RankState.EXITED)
                orders = self._release_stopped(is_last=worked)
                counts = self.request.is_script or (by_us and self._ranks.all_finished)
                if rank.has_finished and counts and message.exit_code != 0:
                    rank.when = "in its exit handlers"
                    self._ranks.drop_outcome(rank)
                return orders if rank.outcome is not None else [*orders, *self._on_rank_failed(rank, now)]
        return []

    def _check_all_done(self, now: float) -> list[Action]:
        """Release the processes once every rank has finished its work: none of them needs another one."""
        if not self._ranks.all_finished or self.state not in (RunState.STARTING, RunState.RUNNING):
            return []
        self._move(RunState.RELEASING)
        self._deadline = None if self.request.is_script else now + EXIT_TIMEOUT_S
        return self._release()

    def _release(self) -> list[Action]:
        """Let ranks that have finished, and wait for the others, exit."""
        return [
            SendMessage(rank.plan.host, wire.Release(attempt=self.attempt, rank=rank.plan.rank))
            for rank in self._ranks.all
            if rank.state is RankState.DONE
        ]

    def _release_stopped(self, *, is_last: bool) -> list[Action]:
        """Release ranks of an attempt that is being stopped once the last rank has ended its work."""
        return self._release() if is_last and self._ranks.none_works and self.state.has_ended_early else []

    # -- a rank fails, or all hang --------------------------------------------------------------------------------

    def _on_rank_failed(self, rank: Rank, now: float) -> list[Action]:
        self._ranks.count_failure(rank)
        return [] if self.state.has_ended_early else self._on_attempt_failed(now)

    def _on_attempt_failed(self, now: float) -> list[Action]:
        """End the attempt after its first failure. Before, the other ranks may complete a checkpoint."""
        self._saving = None
        self._begin_wait(RunState.SAVING, now)
        return []

    def _save(self, latest: CheckpointsInProgress, now: float) -> list[Action]:
        """Stop the other ranks, unless they are storing a checkpoint, or may catch up with the reports of failed ranks.

        It must be possible to commit this checkpoint without the failed ranks, and it must have been in progress when
        the first one failed.
        """
        before = self._saving
        if before is not None:
            parts = (part for part in latest.parts if part in before.parts or part[0] in before.expected)
            expected = {rank: made for rank, made in latest.expected.items() if rank in before.expected}
            latest = replace(latest, parts=frozenset(parts), expected=expected)
        if latest == before:
            return []
        self._saving = latest
        awaited = {rank for rank, _ in latest.parts} or latest.expected.keys()
        if not awaited:
            return self._stop_after_failure(now)
        until = self._waits_since + latest.within_s  # a report that came by then may be stored
        stored_by = min(now, until) + CHECKPOINT_GRACE_S if latest.parts else now
        until = max(until, stored_by) if latest.expected else stored_by
        self._deadline = min(until, max(now, self._stop_by))
        if before is not None or not (latest.parts or self._is_culprit_known):
            return []  # in the second case, an awaited rank may be the culprit
        aim = "store a checkpoint" if latest.parts else "make as many reports"
        return [
            ShowLine(
                f"{name_ranks(self.failed_ranks)} failed; waiting up to {self._deadline - now:.0f} s for "
                f"{name_ranks(awaited)} to {aim}"
            )
        ]

    def _stop_after_failure(self, now: float) -> list[Action]:
        """Stop the ranks of a failed attempt.

        If all failures so far are consequences of another one, the agents wait for that one while they take stacks.
        """
        grace_s = self.request.peer_failure_grace_s
        return self._stop(0.0, now, last_grace_s=grace_s, culprit_known=self._is_culprit_known)

    @property
    def _is_culprit_known(self) -> bool:
        return any(not failure.consequence for failure in self.failures)

    def _on_hang(self, hang: HangDetected, now: float) -> list[Action]:
        if self.state not in (RunState.STARTING, RunState.RUNNING):  # the attempt ended while stacks were taken
            return []
        self.hung = hang
        return self._stop(0.0, now, last_grace_s=self.request.peer_failure_grace_s)

    # -- a rank asks to roll back ---------------------------------------------------------------------------------

    def _on_rollback(self, rank: Rank, asked: Mapping[str, Any], now: float) -> list[Action]:
        """Stop the attempt, so that the next one starts at the newest checkpoint. That is not a failure.

        It is one after another failure, unless that only follows from the end of this rank; and if the run may not roll
        back.
        """
        if self.attempt in self._rollbacks:
            return []
        most, earlier = self.request.failure_config.max_rollbacks, culprit_first(self.failures)
        if self.request.plan is not None:
            self.retries.refusal = "no rollback: only ranks that distrain starts can go back"
        elif 0 <= most <= len(self._rollbacks):
            self.retries.refusal = f"no rollback: FailureConfig(max_rollbacks={most}) allows no more"
        if self.retries.refusal or self.hung or (earlier and not earlier[0].consequence):
            return self._on_rank_failed(rank, now)
        self._rollbacks[self.attempt] = RollBack(
            rank=rank.plan.rank, host=rank.plan.host, reports=rank.reports, why=asked["why"], skip_to=asked["skip_to"]
        )
        if self.state is RunState.STOPPING:
            return []
        return self._stop(0.0, now, last_grace_s=self.request.peer_failure_grace_s)

    def _on_rolled_back(self, back: RolledBack, now: float) -> list[Action]:
        asked, most = self._rollbacks[self.attempt], self.request.failure_config.max_rollbacks
        self.checkpoint, self._skips[back.path or ""] = back.path, back.skip_to
        text = f"{asked}; back to {self._name_start()}"
        if back.suspect:
            text += f", because the newer {back.suspect} has led to several rollbacks"
        self.earlier_attempts.append(f"attempt {self.attempt} before: {text}")
        if asked.skip_to is not None:
            left_out = "the rows since then are left out"
            text += f"; {left_out if asked.skip_to else 'no rows are left out, as distrain knows no position in them'}"
        count = f"rollback {len(self._rollbacks)}" + (f" of {most}" if most >= 0 else "")
        return [ShowLine(f"{text} ({count})"), *self._begin_next_attempt(now)]

    # -- a host is lost, or cannot continue -----------------------------------------------------------------------

    def _on_host_lost(self, lost: HostLost, now: float) -> list[Action]:
        host, why = lost.host, lost.why
        if self._host_pool.is_lost(host):
            return []
        if lost.turned_away and self._host_pool.may_try_later(host, now):
            return self._try_start_attempt(now) if self.state is RunState.CONNECTING else []
        self._host_pool.mark_lost(host, why, now)
        self._prepared.pop(host, None)
        self._busy_hosts.pop(host, None)
        if self.state is RunState.CONNECTING:
            return self._try_start_attempt(now)
        if self.state is RunState.WAITING or self.plan is None or not self.plan.on(host):
            return []
        owes = any(self._loses_work(lost, self._ranks[rank.rank]) for rank in self.plan.on(host))
        if self.state is RunState.RELEASING and self._ranks.all_finished and not owes:
            return self._on_host_idle(host, now)
        self._mark_ranks_lost(lost)
        if self.state in (RunState.RESERVING, RunState.PREPARING) and not self.retries.ever_entered:
            return self._give_up(self._host_pool.describe_losses())
        if self.state.has_ended_early or self.state is RunState.SETTLING:
            return self._on_host_idle(host, now)
        if not lost.owes and all(rank.rank in self.outcomes for rank in self.plan.on(host)):
            return [ShowLine(f"{host}: its ranks had finished, so the other ranks continue without it: {why}")]
        return self._on_attempt_failed(now)

    def _mark_ranks_lost(self, lost: HostLost) -> None:
        """Let the ranks of a lost host fail.

        Ranks that had finished fail, too, if a checkpoint still needs the host and the attempt has not failed already.
        """
        assert self.plan is not None
        had_failed = self.state.has_ended_early or (self.state is RunState.SETTLING and not self._ranks.all_finished)
        for plan in self.plan.on(lost.host):
            rank = self._ranks[plan.rank]
            loses_work = self._loses_work(lost, rank) and rank.has_finished and not had_failed
            if rank.exited is not None and not loses_work:
                continue
            if rank.exited is None:
                self._move_rank(rank, RankState.EXITED)
            rank.exited = wire.Exited(attempt=self.attempt, rank=plan.rank, lost=lost.why)
            if loses_work:
                self._ranks.drop_outcome(rank)
            if rank.outcome is None:
                self._ranks.count_failure(rank)

    def _loses_work(self, lost: HostLost, rank: Rank) -> bool:
        """Return whether work of a rank that had finished may be lost: a checkpoint, or what exit handlers do."""
        return lost.owes or (self.request.is_script and rank.exited is None)

    def spares_for(self, host: str) -> Sequence[str]:
        """Return the hosts that would take the place of this one, none if they have too few slots."""
        if self.plan is None or self.request.plan is not None:
            return ()
        return self._host_pool.spares_for(host, self.plan.hosts, self.plan.world_size)

    def _on_host_slow(self, slow: HostSlow, now: float) -> list[Action]:
        """Stop the attempt, so that a spare host takes the place of a slow one, unless a rank has finished already."""
        spares = self.spares_for(slow.host)
        if self.state is not RunState.RUNNING or self.outcomes or not spares:
            return []
        self._replaced[self.attempt] = slow
        text = f"{slow.host} is slow ({slow.why}); replaced by {name_hosts(spares)} at {self._name_checkpoint()}"
        return [ShowLine(text), *self._stop(0.0, now, last_grace_s=self.request.peer_failure_grace_s)]

    def _on_problem(self, problem: str, now: float) -> list[Action]:
        """End the run: a host or the storage cannot continue."""
        self.problem = self.problem or problem
        if self.state in (RunState.STOPPING, RunState.SETTLING):
            return []
        if self.attempt_is_active:
            return self._stop(0.0, now, last_grace_s=self.request.peer_failure_grace_s)
        if self.state in (RunState.CONNECTING, RunState.WAITING):
            self._forget_attempt()
        return self._give_up(self.problem)

    # -- the user asks the run to stop ----------------------------------------------------------------------------

    def _on_stop_requested(self, why: str, now: float) -> list[Action]:
        has_ended = self.state.has_ended_early or self.state is RunState.SETTLING
        if has_ended and self.stop_reason is None and self.failures:
            if self._retry_forbidden:
                return self._stop_now(now)
            self._retry_forbidden = True  # the run ends with the failure, which the user should see
            return self._stop_after_failure(now) if self.state is RunState.SAVING else []
        is_repeated = self.stop_reason is not None
        self.stop_reason = self.stop_reason or why
        if is_repeated or self.state.has_ended_early:
            return self._stop_now(now)
        pressed = stopped_by(why)
        again = "Ctrl-C" if why == BY_COMMAND else f"{pressed} again"
        if self.state is RunState.SETTLING:
            self._waits_since = now  # the grace begins
            return [ShowLine(f"{pressed}: the run stops when its checkpoint is stored. {again} ends the wait")]
        if not self.attempt_is_active:
            return self._end_early(RunState.STOPPED)
        grace_s = self.request.stop_grace_s
        if self.saves_on_stop:
            self._deadline = self._stop_by = now + grace_s
            text = f"{pressed}: the run stops; the workers have {grace_s:g} s to save a checkpoint"
            return [
                ShowLine(f"{text}. {again} kills the workers now"),
                *self._send_stop_orders(self._stop_consensus.request_stop()),
            ]
        text = f"{pressed}: the run stops within {grace_s:g} s"
        if self.request.is_script:
            text = f"{pressed}: passed on to the workers, which have {grace_s:g} s to end"
        elif not self._stop_consensus.callers:
            text += "; no checkpoint is saved because no rank has called should_stop()"
        return [ShowLine(f"{text}. {again} kills the workers now"), *self._pass_signal_on(grace_s, now)]

    def _stop_now(self, now: float) -> list[Action]:
        """Kill the ranks. If none are left, end the wait for their checkpoints."""
        return self._end_attempt(now) if self.state is RunState.SETTLING else self._stop(0.0, now)

    def _pass_signal_on(self, grace_s: float, now: float) -> list[Action]:
        """Stop the ranks by the signal that came; by SIGTERM, and at last by SIGKILL, those that do not end."""
        assert self.plan is not None
        assert self.stop_reason is not None
        if not grace_s:
            return self._stop(0.0, now)
        name = signal_of(self.stop_reason)
        last_grace_s = 0.0 if name == "SIGTERM" else TERM_GRACE_S
        self._signalled_hosts.update(self.plan.hosts)
        return self._stop(grace_s, now, signal=name, last_grace_s=last_grace_s)

    def _send_stop_orders(self, orders: Iterable[wire.StopDecision]) -> list[Action]:
        return [SendMessage(self._ranks[order.rank].plan.host, order) for order in orders]

    # -- the attempt ends -----------------------------------------------------------------------------------------

    def _stop(
        self, grace_s: float, now: float, *, signal: str = "", last_grace_s: float = 0.0, culprit_known: bool = True
    ) -> list[Action]:
        """Stop all processes of the attempt. The arguments are explained in :class:`distrain.wire.Stop`."""
        assert self.plan is not None
        latest = self._deadline if self.state is RunState.STOPPING and self._deadline is not None else math.inf
        if self.state is not RunState.STOPPING:
            self._move(RunState.STOPPING)
        if not (hosts := self.living_hosts):
            return self._settle(now)
        self._last_grace_s = last_grace_s
        exit_grace_s = 0.0 if self.was_asked_to_stop else self.request.stop_grace_s
        self._deadline = min(latest, now + grace_s + max(last_grace_s, exit_grace_s) + self._stop_timeout_s(hosts))
        stop = wire.Stop(
            attempt=self.attempt,
            grace_s=grace_s,
            signal=signal,
            last_grace_s=last_grace_s,
            exit_grace_s=exit_grace_s,
            culprit_known=culprit_known,
            problem=self.problem or "",
            reason=self.stop_reason or "",
        )
        return [SendMessage(host, stop) for host in hosts]

    def _on_last_stacks(self, host: str) -> None:
        """Note that the ranks of a host get SIGTERM now: ends of ranks that arrived before were not due to it."""
        self._grace_is_over = self.state is RunState.STOPPING and self.was_asked_to_stop
        if self.state is RunState.STOPPING and self._last_grace_s:
            self._signalled_hosts.add(host)

    def _stop_timeout_s(self, hosts: Iterable[str]) -> float:
        """Return the seconds to wait for the hosts to end all processes, beyond the grace.

        Wait at least until every remote lease has expired: a silent host then counts as lost, and the next attempt may
        run without it.
        """
        if self.was_asked_to_stop:
            return STOP_TIMEOUT_S
        settings = [self.request.hosts[host] for host in hosts]
        return max([STOP_TIMEOUT_S, *(host.lease_s + LEASE_MARGIN_S for host in settings if not host.is_local)])

    def _on_host_idle(self, host: str, now: float) -> list[Action]:
        if not self.attempt_is_active:  # the host has sent this twice: as its workers ended, and as answer to Stop
            return []
        self._busy_hosts.pop(host, None)
        return [] if self._busy_hosts else self._settle(now)

    # -- its checkpoints are completed ----------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Action]:
        """No process of the attempt is left. Whether and where the next one starts depends on its checkpoints."""
        self._begin_wait(RunState.SETTLING, now)
        return []

    def _begin_wait(self, state: RunState, now: float) -> None:
        """Wait in this state for what is :class:`Outstanding`."""
        self._move(state)
        self._deadline, self._waits_since, self._has_announced_wait = None, now, False

    def _on_outstanding(self, work: Outstanding, now: float) -> list[Action]:
        match self.state:
            case RunState.PREPARING if not (work.verifying or work.copying):
                return self._start_workers()
            case RunState.PREPARING:
                name = self._name_checkpoint()
                text = f"verifying the checkpoint {name}, from which the run continues; Ctrl-C ends the run"
                return self._wait(text if work.verifying else "", now)
            case RunState.SAVING:
                return self._save(work.saving, now)
            case RunState.SETTLING if work.committing:
                return self._wait(
                    f"waiting until everything is written to {self._run_directory}; press Ctrl-C to stop waiting", now
                )
            case RunState.SETTLING if work.uploading and now < (limit := self._upload_limit()):
                text = "waiting for the checkpoint that is being stored"
                return self._wait(text, now, says_at_once=bool(self.failures), limit=limit)
            case RunState.SETTLING:
                if work.lost and self.is_done:
                    self._lose_work(*work.lost)
                return self._end_attempt(now, is_all_stored=not work.uploading)
        return []

    def _lose_work(self, number: int, why: str) -> None:
        """Let a rank that had finished fail, because what it has saved is lost."""
        rank = self._ranks[number]
        rank.exited = wire.Exited(attempt=self.attempt, rank=number, lost=why)
        self._ranks.drop_outcome(rank)
        self._ranks.count_failure(rank)

    def _wait(self, text: str, now: float, *, says_at_once: bool = False, limit: float = math.inf) -> list[Action]:
        """Go on waiting, until ``limit`` at the latest. Say so once, when that takes long."""
        notice_due = self._waits_since + (0.0 if says_at_once else NOTICE_AFTER_S)
        if self._has_announced_wait or not text:
            notice_due = math.inf
        if is_due := now >= notice_due:
            self._has_announced_wait, notice_due = True, math.inf
        moment = min(limit, notice_due)
        self._deadline = moment if moment < math.inf else None
        return [ShowLine(text, is_news=True)] if is_due else []

    def _upload_limit(self) -> float:
        """Return until when the attempt waits for uploads: less is lost by that than the time it takes.

        It waits without limit only if all work is done, and only for the grace if the user wants the run to stop.
        """
        if self.was_asked_to_stop:
            return self._waits_since + self.request.stop_grace_s
        return math.inf if self.is_done and not self.problem else self._waits_since + UPLOAD_PATIENCE_S

    # -- the attempt has ended ------------------------------------------------------------------------------------

    def _end_attempt(self, now: float, *, is_all_stored: bool = False) -> list[Action]:
        """Go on after an attempt of which nothing is left: the run finishes, fails, is stopped or is restarted."""
        self._deadline = None
        finished = self.is_done and is_all_stored and not self.storage_failed
        why = None if finished else self._describe_early_end()
        ended: list[Action] = [AttemptEnded(self.attempt, tuple(self.failures), why)]
        if finished:
            self._end(RunState.FINISHED)  # even if a stop was requested at the last moment
        elif self.stop_reason is not None:
            self._end(RunState.STOPPED)
        elif (slow := self._replaced.get(self.attempt)) and not self.problem:
            self._host_pool.mark_lost(slow.host, f"it was slow: {slow.why}", now)
            self._prepared.pop(slow.host, None)
            return [*ended, *self._begin_next_attempt(now)]
        elif (rollback := self._rollbacks.get(self.attempt)) and not self.problem:
            return [*ended, rollback]
        elif self._may_restart():
            failure = self._describe_failure()
            self.earlier_attempts.append(f"attempt {self.attempt} before: {failure.splitlines()[0]}")
            return [*ended, ShowLine(failure), *self._restart(now)]
        else:
            self.problem = self.problem or self._lost_host_error()
            self._end(RunState.FAILED)
        return ended

    def _describe_early_end(self) -> str | None:
        """Return why the attempt ended early, or None if the failure of a rank ended it."""
        if self.stop_reason is not None:
            return f"stopped by {self.stop_reason}"
        if self.hung is not None and not self.failures:
            return self._describe_failure()
        slow = self._replaced.get(self.attempt)
        if rollback := self._rollbacks.get(self.attempt):
            return self.problem or str(rollback)
        if self.problem or not slow:
            return self.problem or finished_early(self.failures, self.outcomes)
        return f"{slow.host} was slow: {slow.why}"

    def _lost_host_error(self) -> str | None:
        """Return the text of the error for a run that lost a host and may not restart."""
        assert self.plan is not None
        losses = self._host_pool.describe_losses(self.plan.hosts)
        if not losses or self.request.failure_config.max_failures:
            return losses or None
        return (
            f"{losses}\nFailureConfig(max_failures=1) lets a run continue once: on spare slots, on fewer hosts with "
            "num_workers=(min, max), or when the host is back"
        )

    def _describe_failure(self) -> str:
        if not self.failures:
            assert self.hung is not None
            why = self.hung.deadlock or f"no rank has made progress for {self.hung.after_s:g} s"
            return "\n    ".join([why, *self.hung.where])
        if early := finished_early(self.failures, self.outcomes):
            return early
        culprit = culprit_first(self.failures)[0]
        if not culprit.lost:
            place = raised_at(culprit.traceback)
            how = f"failed: {culprit.summary}" if culprit.kind == "exception" else culprit.summary
            log = f"; its log: attempt_{self.attempt}/rank_{culprit.rank}.log" if self.request.keeps_logs else ""
            return f"rank {culprit.rank}{on_host(culprit.host)} {how}{f' ({place})' if place else ''}{log}"
        losses: dict[str, list[RankFailure]] = {}
        for failure in self.failures:
            if failure.lost:
                losses.setdefault(failure.summary, []).append(failure)
        return "; ".join(_describe_loss(summary, lost) for summary, lost in losses.items())

    # -- the run is restarted, or ends ----------------------------------------------------------------------------

    def _may_restart(self) -> bool:
        if self.problem or self._retry_forbidden:
            return False
        culprit = culprit_first(self.failures)[0] if self.failures else None
        reports = self._ranks[culprit.rank].reports if culprit else 0
        stranded = (self.hung.deadlock or None) if self.hung else finished_early(self.failures, self.outcomes)
        return self.retries.allow(culprit, reports=reports, checkpoint=self.checkpoint, stranded=stranded)

    def _restart(self, now: float) -> list[Action]:
        delay_s = self.retries.delay_s()
        if not delay_s:
            return self._begin_next_attempt(now)
        self._move(RunState.WAITING)
        self._deadline = now + delay_s
        return [ShowLine(f"the next attempt starts in {delay_s:g} s")]

    def _begin_next_attempt(self, now: float) -> list[Action]:
        lost_before = set(self._host_pool.losses)
        reconnect_s = self.request.failure_config.host_wait_s
        actions = self._search_hosts(now, reconnect_s=reconnect_s, wait_s=LOST_HOST_GRACE_S)
        hosts = [action.host for action in actions if isinstance(action, ConnectHost)]
        if not hosts:
            return actions
        again = " again" if lost_before >= set(hosts) else ""
        return [ShowLine(f"trying to reach {name_hosts(hosts)}{again}"), *actions]

    def _give_up(self, problem: str) -> list[Action]:
        self.problem = self.problem or problem
        return self._end_early(RunState.FAILED)

    def _end_early(self, state: RunState) -> list[Action]:
        """End the run. An attempt ends with it whose ranks were never started, or cannot be ended."""
        has_attempt = self.state in (RunState.RESERVING, RunState.PREPARING, RunState.STOPPING)
        self._end(state)
        return [AttemptEnded(self.attempt, tuple(self.failures), self._describe_early_end())] if has_attempt else []

    # -- moves ----------------------------------------------------------------------------------------------------

    def _end(self, state: RunState) -> None:
        self._deadline = None
        self._move(state)

    def _move(self, new: RunState) -> None:
        self.story.append(f"attempt {self.attempt}: {self.state.name} -> {new.name}")
        if new not in RUN_MOVES[self.state]:
            raise InvalidTransition("\n".join(["illegal move of the run; please report this bug", *self.story]))
        self.state = new

    def _move_rank(self, rank: Rank, new: RankState) -> None:
        self.story.append(f"attempt {self.attempt}, rank {rank.plan.rank}: {rank.state.name} -> {new.name}")
        if new not in RANK_MOVES[rank.state]:
            raise InvalidTransition("\n".join(["illegal move of a rank; please report this bug", *self.story]))
        self._ranks.move(rank, new)


def _describe_loss(summary: str, lost: Sequence[RankFailure]) -> str:
    """Describe the loss of ranks, perhaps of several hosts, for the same reason."""
    ranks, hosts = name_ranks([failure.rank for failure in lost]), name_hosts(dict.fromkeys(f.host for f in lost))
    return f"{ranks} on {hosts} {'were' if len(lost) > 1 else 'was'} {summary}"

"""The run as a state machine: ``RunStateMachine.handle(event, now) -> [Action]``. Runs in: coordinator.

Pure: no I/O, no clock, no threads. The coordinator turns what it hears into events, and carries out the actions that
the machine returns. Only the machine changes the states of the run and of its ranks; :mod:`distrain.decisions.states`
explains them. Each handler says which event it handles, and in which states. The sections below follow the life of an
attempt: hosts connect, ports are reserved, ranks train; ranks
or hosts fail, or the user asks the run to stop; the attempt ends, and the run ends or is restarted.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from distrain import wire
from distrain.decisions import events
from distrain.decisions.blame import culprit_first, finished_early
from distrain.decisions.checkpoints.actions import NewStart
from distrain.decisions.hearing import on, table_of
from distrain.decisions.placement import Launch, make_plan
from distrain.decisions.ranks import Rank, Ranks
from distrain.decisions.run.growth import Growth
from distrain.decisions.run.host_pool import HOST_ANSWER_TIMEOUT_S, HostPool, Readiness, info_of
from distrain.decisions.run.retries import RetryPolicy, start_without_checkpoint
from distrain.decisions.run.rollbacks import Rollbacks
from distrain.decisions.run.saving import Saving
from distrain.decisions.run.stopping import TERM_GRACE_S, Stopping
from distrain.decisions.run.telling import changed_plan, crowded_hosts, failed_attempt, lost_host_error, missing_hosts
from distrain.decisions.states import STORY_LENGTH, RankState, RunState, note_move
from distrain.errors import LaunchError, ResourcesError
from distrain.system.text import name_hosts, name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distrain.errors import RankFailure
    from distrain.hosts.world import WorldPlan

LOST_HOST_GRACE_S = 10.0
"""Seconds to wait for lost hosts before restarting without them. Equals ssh's connect timeout."""
EXIT_TIMEOUT_S = 600.0
"""Seconds to wait for exit handlers of ranks that have finished train_func, before the run fails. Scripts have more."""
UPLOAD_PATIENCE_S = 300.0
"""Seconds that an attempt with unfinished work waits at its end for uploads that complete a checkpoint."""
NOTICE_AFTER_S = 5.0
"""Seconds to wait for checkpoints before a line on the console says so."""
_EARLIER_KEPT = 5
"""Number of earlier attempts that an error shows."""


class _Due(NamedTuple):
    """The deadline of the state has passed."""


class RunStateMachine:
    """One run, from the first HELLO to its end."""

    def __init__(self, request: events.RunRequest) -> None:
        self.request = request
        self.state = RunState.CONNECTING
        self.attempt = request.first_attempt - 1
        self.checkpoint = request.checkpoint
        """Path or URL of the latest checkpoint, from which the next attempt starts."""
        self.problem: str | None = None
        """The reason why the run cannot continue, if no rank is to blame."""
        self.resources_missing = False
        """The hosts do not have what the scaling config asks for."""
        self.storage_failed = False
        """The run directory cannot be written."""
        self.plan: WorldPlan | None = None
        """The plan of the latest attempt."""
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)
        """The latest moves of the run and its ranks."""
        self.stopping = Stopping(request)
        self.retries = RetryPolicy(request.failure_config, is_script=request.is_script)
        self._restarts_told = 0
        """The number of restarts after failures that lines have told of."""
        self.hung: events.HangDetected | None = None
        """The hang that ended the latest attempt."""
        self._rollbacks = Rollbacks(request)
        self.earlier_attempts: deque[str] = deque(maxlen=_EARLIER_KEPT)
        """One line for each earlier attempt, with its failure."""
        slots = {name: settings.slots for name, settings in request.hosts.items()}
        self._host_pool = HostPool(slots, request.scaling)
        self._growth = Growth(request.scaling, self._host_pool)
        self._launch = Launch(request)
        self._ranks = Ranks()
        self._busy_hosts: dict[str, None] = {}
        self._saving: Saving | None = None
        """The checkpoints that SAVING waits for; None until they are known."""
        self._waits_since = math.inf
        """When the wait of PREPARING, SAVING or SETTLING began."""
        self._has_announced_wait = False
        self._deadline = math.inf
        self._now = 0.0
        self._actions: list[events.Action] = []

    # -- the state of the run -------------------------------------------------------------------------------------

    @property
    def value(self) -> bytes | None:
        """Rank 0's pickled return value, if every rank has finished its work."""
        return self._ranks.outcomes[0].body if self.is_done else None

    @property
    def finished(self) -> list[int]:
        """The ranks of the latest attempt that have finished their work."""
        return sorted(self._ranks.outcomes)

    @property
    def failures(self) -> list[RankFailure]:
        """The failures of the latest attempt, in order of arrival. One that was ended on purpose has none."""
        was_planned = self._rollbacks.of(self.attempt) or self._growth.reason(self.attempt)
        return [] if was_planned else self._ranks.failures()

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
        others = {failure.rank for failure in self.failures} | self._ranks.outcomes.keys()
        return [number for number in range(len(self._ranks.all)) if number not in others]

    @property
    def living_hosts(self) -> list[str]:
        """The hosts of the attempt, without those that were lost after all of their ranks had finished."""
        return [host for host in (self.plan.hosts if self.plan else ()) if not self._host_pool.is_lost(host)]

    @property
    def attempt_is_active(self) -> bool:
        """True if there may be processes of the latest attempt."""
        working = (RunState.STARTING, RunState.RUNNING, RunState.RELEASING)
        return self.state in working or self.state.has_ended_early

    def has_succeeded(self, end: wire.Exited) -> bool:
        """Return whether a rank has done its work that has sent no outcome: a script may end by its exit code alone."""
        return self.request.is_script and end.exit_code == 0 and self._ranks[end.rank].state is RankState.RUNNING

    def deadline(self) -> float:
        """Return when the machine needs a :class:`~distrain.decisions.events.Tick`."""
        growth_due = self._growth.due if self._may_grow else math.inf
        return min(self._deadline, self.stopping.consensus.deadline, growth_due)

    # -- events ---------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[events.Action]:
        """Begin the run. Must be called once, before any event."""
        self._now = now
        self._search_hosts(reconnect_s=0.0, wait_s=HOST_ANSWER_TIMEOUT_S)
        return self._take_actions()

    def handle(self, event: events.Event | NewStart | wire.Message, now: float, host: str = "") -> list[events.Action]:
        """Return what to do about ``event``. Raise InvalidTransition, with the story, if it is impossible now.

        The end of a run is final, except that a finished run fails if its last report cannot be stored after all.

        host: the one that a message is from.
        """
        self._now = now
        is_late = isinstance(event, wire.OfAttempt) and event.attempt != self.attempt
        is_unstored = self.state is RunState.FINISHED and isinstance(event, events.StorageFailed)
        if not is_late and (is_unstored or not self.state.is_terminal):
            self._dispatch(host, event)
        return self._take_actions()

    def _dispatch(self, host: str, event: object) -> None:
        kind = type(event)
        if (handler := HANDLERS.get((kind, self.state)) or HANDLERS.get((kind, None))) is not None:
            handler(self, host, event)

    def _do(self, *actions: events.Action) -> None:
        self._actions += actions

    def _take_actions(self) -> list[events.Action]:
        actions, self._actions = self._actions, []
        return actions

    @on(NewStart)
    def _on_checkpoint(self, _: str, event: NewStart) -> None:
        self.checkpoint = event.path
        if event.is_new and self.plan and self._may_grow and self._growth.ends(self.attempt, self.plan, self._now):
            self._stop_others()

    @on(wire.Notice)
    def _on_notice(self, host: str, message: wire.Notice) -> None:
        self._do(events.ShowLine(f"{host}: {message.text}", once=True))

    @on(events.Tick)
    def _on_tick(self, _: str, event: events.Tick) -> None:
        self._send_stop_orders(self.stopping.consensus.tick(self._now))
        if self._may_grow and self._now >= self._growth.due:
            self._do(*map(events.ConnectHost, self._growth.hosts_to_try(self._now)))
        if self._now >= self._deadline:
            self._deadline = math.inf
            self._dispatch("", _Due())

    @on(_Due, RunState.STARTING, RunState.RUNNING)
    def _on_stop_grace_over(self, _: str, event: _Due) -> None:
        """End the ranks: should_stop() is true, and they have had the time to save."""
        self._stop(self.stopping.signal_order(TERM_GRACE_S))

    @on(_Due, RunState.RESERVING)
    def _on_no_port(self, _: str, event: _Due) -> None:
        assert self.plan is not None
        self._give_up(f"{self.plan.hosts[0]}: no port was reserved within {HOST_ANSWER_TIMEOUT_S:g} s")

    @on(_Due, RunState.STOPPING)
    def _on_cannot_end(self, _: str, event: _Due) -> None:
        text = f"{name_hosts(self._busy_hosts)}: processes could not be ended within the time limit"
        if self.is_done:
            self._do(events.ShowLine(text))
            self._begin_wait(RunState.SETTLING)
        else:
            self._give_up(text)

    @on(_Due, RunState.RELEASING)
    def _on_late_exits(self, _: str, event: _Due) -> None:
        """End the run because of ranks that do not exit: what their exit handlers do, such as an upload, is cut off."""
        late = [rank for rank in self._ranks.all if rank.exited is None]
        for rank in late:
            self._ranks.drop_outcome(rank)
        who = name_ranks([rank.plan.rank for rank in late]) if late else "child processes of the ranks"
        text = f"{who} did not exit within {EXIT_TIMEOUT_S:g} s after all ranks had finished; killed"
        if late:
            self._end_for(text)
        else:
            self._do(events.ShowLine(text))
            self._stop(self.stopping.order())

    # -- hosts connect --------------------------------------------------------------------------------------------

    @on(wire.Hello)
    def _on_hello(self, host: str, hello: wire.Hello) -> None:
        self._host_pool.mark_connected(host, info_of(host, hello, self.request.hosts[host]))
        if self.state is RunState.CONNECTING:
            self._try_start_attempt()

    def _search_hosts(self, *, reconnect_s: float, wait_s: float) -> None:
        self._host_pool.begin_search(self._now, reconnect_s=reconnect_s, wait_s=wait_s)
        self._try_start_attempt()

    @on(_Due, RunState.CONNECTING)
    def _try_start_attempt(self, *_: object) -> None:
        """Begin the next attempt if there are hosts for it. Otherwise connect further hosts and wait, or give up."""
        connecting = [events.ConnectHost(host) for host in self._host_pool.hosts_to_connect(self._now)]
        readiness = self._host_pool.readiness(self._now)
        if readiness is Readiness.READY:
            self._do(*connecting)
            self._plan_attempt()
            return
        if self.state is not RunState.CONNECTING:
            self._move(RunState.CONNECTING)
        if readiness is Readiness.HOPELESS:
            self._give_up(missing_hosts(self._host_pool, self.request, has_restarted=bool(self.retries.used)))
            return
        if text := self._host_pool.describe_progress(self._now):
            self._do(events.ShowLine(text))
        self._deadline = self._host_pool.deadline()
        self._do(*connecting)

    def _plan_attempt(self) -> None:
        before = self.plan
        try:
            self.plan = self.request.plan or make_plan(self._host_pool.connected, self.request.scaling)
        except ResourcesError as error:
            self.resources_missing = True
            self._give_up(str(error))
            return
        text = changed_plan(before, self.plan, self._host_pool, self.request.scaling.max_workers)
        if text := self._growth.describe(self.attempt, self.plan.world_size, self._name_start()) or text:
            self._do(events.ShowLine(text))
        self._do(*(events.ShowLine(text, once=True) for text in crowded_hosts(self.plan, self._host_pool)))
        self._do(*self._launch.prepare(self.plan))
        self._begin_attempt(self.plan)

    # -- an attempt begins: ports are reserved, hosts get their files, workers start --------------------------------

    def _begin_attempt(self, plan: WorldPlan) -> None:
        self._move(RunState.RESERVING)
        self.attempt += 1
        self._ranks = Ranks(plan)
        self._busy_hosts = dict.fromkeys(plan.hosts)
        self.hung = None
        self.stopping.begin(self.attempt)
        self._deadline = self._now + HOST_ANSWER_TIMEOUT_S
        self._do(events.AttemptStarts(self.attempt, plan), self._launch.reserve(plan, self.attempt))

    @on(wire.RendezvousPort, RunState.RESERVING)
    def _on_port_reserved(self, _: str, message: wire.RendezvousPort) -> None:
        self._launch.meeting_point = message
        self._begin_wait(RunState.PREPARING)

    @on(events.Outstanding, RunState.PREPARING)
    def _on_preparing(self, _: str, work: events.Outstanding) -> None:
        if work.verifying or work.copying:
            name = self._name_checkpoint()
            text = f"verifying the checkpoint {name}, from which the run continues; Ctrl-C ends the run"
            self._wait(text if work.verifying else "")
        else:
            self._start_workers()

    def _start_workers(self) -> None:
        assert self.plan is not None
        skip_to = self._rollbacks.skip_to(self.checkpoint)
        try:
            starts = self._launch.start(self.plan, self.checkpoint, skip_to)
        except LaunchError as error:
            if not self._drop_new_hosts(str(error)):
                self._give_up(str(error))
            return
        self._move(RunState.STARTING)
        self._deadline, self.retries.started_from = math.inf, self.checkpoint
        if self.retries.used > self._restarts_told:
            self._restarts_told = self.retries.used
            self._do(events.ShowLine(f"{self.retries}, from {self._name_start()}"))
        self._do(*starts, events.WorkersStart(self.plan))

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

    @on(wire.StopVote)
    def _on_vote(self, _: str, vote: wire.StopVote) -> None:
        self._send_stop_orders(self.stopping.consensus.vote(vote.rank, vote.call, self._now))

    @on(wire.Running)
    def _on_running(self, _: str, message: wire.Running) -> None:
        rank = self._ranks[message.rank]
        rank.when, self.retries.ever_entered = "during training", True
        self._move_rank(rank, RankState.RUNNING)
        if self.state is RunState.STARTING and self._ranks.all_started:
            self._move(RunState.RUNNING)
            self._growth.begin(len(self._ranks.all), self._now)
            self._do(events.AllTrain())

    @on(events.RankEnds)
    def _on_rank_ends(self, _: str, ends: events.RankEnds) -> None:
        self._ranks[ends.rank].reports, self._ranks[ends.rank].reason = ends.reports, ends.reason

    @on(wire.Outcome)
    def _on_outcome(self, _: str, outcome: wire.Outcome) -> None:
        rank, worked = self._ranks[outcome.rank], not self._ranks.none_works
        was_told = self.stopping.was_told(rank.plan.host)
        if not (was_told and (outcome.ok or outcome.exits)):  # else it ends because it was told to
            self._ranks.set_outcome(rank, outcome)
            rank.was_told = was_told and self.stopping.reason is None
        self._move_rank(rank, RankState.DONE if outcome.ok else RankState.RAISED)
        self._send_stop_orders(self.stopping.consensus.mark_finished(outcome.rank))
        self._release_stopped(is_last=worked)
        if outcome.rollback is not None:
            self._on_rollback(rank, outcome.rollback)
        elif outcome.ok:
            self._check_all_done()
        else:
            self._on_rank_failed(rank)

    @on(wire.Exited)
    def _on_exited(self, _: str, end: wire.Exited) -> None:
        rank, worked = self._ranks[end.rank], not self._ranks.none_works
        was_told = self.stopping.was_told(rank.plan.host)
        # Before the attempt is stopped, even a signal that distrain sent is a failure: a run says why it ends.
        by_us = self.state is RunState.STOPPING and (end.by_us or (was_told and end.lost is None))
        rank.exited = replace(end, by_us=by_us)
        self._move_rank(rank, RankState.EXITED)
        self._release_stopped(is_last=worked)
        counts = self.request.is_script or (by_us and self._ranks.all_finished)
        if rank.has_finished and counts and end.exit_code != 0:
            rank.when = "in its exit handlers"
            self._ranks.drop_outcome(rank)
        if rank.outcome is None:
            self._on_rank_failed(rank)

    def _check_all_done(self) -> None:
        """Release the processes once every rank has finished its work: none of them needs another one."""
        if self._ranks.all_finished and self.state in (RunState.STARTING, RunState.RUNNING):
            self._move(RunState.RELEASING)
            self._deadline = math.inf if self.request.is_script else self._now + EXIT_TIMEOUT_S
            self._release()

    def _release(self) -> None:
        """Let ranks that have finished, and wait for the others, exit."""
        for rank in self._ranks.all:
            if rank.state is RankState.DONE:
                self._do(events.SendMessage(rank.plan.host, wire.Release(attempt=self.attempt, rank=rank.plan.rank)))

    def _release_stopped(self, *, is_last: bool) -> None:
        """Release ranks of an attempt that is being stopped once the last rank has ended its work."""
        if is_last and self._ranks.none_works and self.state.has_ended_early:
            self._release()

    # -- a rank fails, or all hang --------------------------------------------------------------------------------

    def _on_rank_failed(self, rank: Rank) -> None:
        self._ranks.count_failure(rank)
        if not self.state.has_ended_early:
            self._on_attempt_failed()

    def _on_attempt_failed(self) -> None:
        """End the attempt after its first failure. Before, the other ranks may complete a checkpoint."""
        self._saving = None
        self._begin_wait(RunState.SAVING)

    @on(events.Outstanding, RunState.SAVING)
    def _on_saving(self, _: str, work: events.Outstanding) -> None:
        """Stop the other ranks, unless they store a checkpoint, or may catch up with the reports of failed ranks."""
        is_new = self._saving is None
        self._saving = self._saving or Saving(self._waits_since, self.stopping.save_by)
        if not self._saving.update(work.saving, self._now):
            return
        if not self._saving.awaited:
            self._stop_after_failure()
            return
        self._deadline = self._saving.until
        if is_new and (self._saving.is_storing or self._is_culprit_known):  # else an awaited rank may be the culprit
            self._do(events.ShowLine(self._saving.describe(self.failed_ranks, self._now)))

    @on(_Due, RunState.SAVING)
    def _stop_after_failure(self, *_: object) -> None:
        """Stop the ranks of a failed attempt.

        If all failures so far are consequences of another one, the agents wait for that one while they take stacks.
        """
        self._stop_others(culprit_known=self._is_culprit_known)

    @property
    def _is_culprit_known(self) -> bool:
        return any(not failure.consequence for failure in self.failures)

    @on(events.HangDetected, RunState.STARTING, RunState.RUNNING)  # else the attempt ended while stacks were taken
    def _on_hang(self, _: str, hang: events.HangDetected) -> None:
        self.hung = hang
        self._stop_others()

    def _stop_others(self, *, culprit_known: bool = True) -> None:
        """Stop all ranks, because of one of them or of its host."""
        grace_s = self.request.peer_failure_grace_s
        self._stop(self.stopping.order(last_grace_s=grace_s, culprit_known=culprit_known))

    # -- a rank asks to roll back ---------------------------------------------------------------------------------

    def _on_rollback(self, rank: Rank, asked: Mapping[str, Any]) -> None:
        """Stop the attempt, so that the next one starts at the newest checkpoint. That is not a failure.

        It is one after another failure, unless that only follows from the end of this rank; and if the run may not roll
        back.
        """
        if self._rollbacks.of(self.attempt):
            return
        earlier = culprit_first(self.failures)
        self.retries.refusal = self._rollbacks.refusal or self.retries.refusal
        if self.retries.refusal or self.hung or (earlier and not earlier[0].consequence):
            self._on_rank_failed(rank)
            return
        self._rollbacks.begin(self.attempt, rank, asked)
        if self.state is not RunState.STOPPING:
            self._stop_others()

    @on(events.RolledBack)
    def _on_rolled_back(self, _: str, back: events.RolledBack) -> None:
        self.checkpoint = back.path
        text = self._rollbacks.end(self.attempt, back, self._name_start())
        self.earlier_attempts.append(f"attempt {self.attempt} before: {text}")
        self._do(events.ShowLine(text))
        self._begin_next_attempt()

    # -- hosts are back that the run lacks ------------------------------------------------------------------------

    @property
    def _may_grow(self) -> bool:
        """True if the attempt may end at a checkpoint: it trains, and neither its end nor that of the run is near."""
        return self.state is RunState.RUNNING and not (self._ranks.outcomes or self.stopping.was_asked)

    def _drop_new_hosts(self, why: str) -> bool:
        """Do without the hosts for which the run has just grown, if there are any. Their loss ends the attempt."""
        if hosts := [host for host in self._growth.on_trial(self.attempt) if host in self._busy_hosts]:
            self._do(events.ShowLine(f"{why}; the run continues without {name_hosts(hosts)}", once=True))
        self._do(*(events.SendMessage(host, wire.Close()) for host in hosts))
        return bool(hosts)

    def _begin_at_once(self) -> None:
        """Begin the next attempt with the hosts that are connected, if they are enough."""
        self._search_hosts(reconnect_s=self.request.failure_config.host_wait_s, wait_s=0.0)

    # -- a host is lost, or cannot continue -----------------------------------------------------------------------

    @on(events.HostLost)
    def _on_host_lost(self, _: str, lost: events.HostLost) -> None:
        host, why = lost.host, lost.why
        if self._host_pool.is_lost(host):
            return
        is_later = lost.turned_away and self._host_pool.may_try_later(host, self._now)
        if not is_later:
            self._host_pool.mark_lost(host, why, self._now)
            self._launch.forget(host)
            self._busy_hosts.pop(host, None)
        if self.state is RunState.CONNECTING:
            self._try_start_attempt()
        elif not (is_later or self.state is RunState.WAITING or self.plan is None) and self.plan.on(host):
            self._lose(lost, self.plan)

    def _lose(self, lost: events.HostLost, plan: WorldPlan) -> None:
        """Go on without a host of the attempt, or end it."""
        host = lost.host
        owes = any(self._loses_work(lost, self._ranks[rank.rank]) for rank in plan.on(host))
        if self.state is RunState.RELEASING and self._ranks.all_finished and not owes:
            self._note_idle(host)
            return
        self._mark_ranks_lost(lost)
        if self.state in (RunState.RESERVING, RunState.PREPARING) and not self.retries.ever_entered:
            self._give_up(self._host_pool.describe_losses())
        elif self.state.has_ended_early or self.state is RunState.SETTLING:
            self._note_idle(host)
        elif not lost.owes and all(rank.rank in self._ranks.outcomes for rank in plan.on(host)):
            text = f"{host}: its ranks had finished, so the other ranks continue without it: {lost.why}"
            self._do(events.ShowLine(text))
        else:
            self._on_attempt_failed()

    def _mark_ranks_lost(self, lost: events.HostLost) -> None:
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
            self._lose_rank(rank, lost.why, loses_work=loses_work)

    def _lose_rank(self, rank: Rank, why: str, *, loses_work: bool) -> None:
        """Let a rank fail that is lost. ``loses_work``: it had finished, but what it has saved is lost."""
        rank.exited = wire.Exited(attempt=self.attempt, rank=rank.plan.rank, lost=why)
        if loses_work:
            self._ranks.drop_outcome(rank)
        if rank.outcome is None:
            self._ranks.count_failure(rank)

    def _loses_work(self, lost: events.HostLost, rank: Rank) -> bool:
        """Return whether work of a rank that had finished may be lost: a checkpoint, or what exit handlers do."""
        return lost.owes or (self.request.is_script and rank.exited is None)

    @on(wire.HostFailed)
    def _on_host_failed(self, host: str, message: wire.HostFailed) -> None:
        why = f"{host}: {message.text}"
        if not self._drop_new_hosts(why):
            self._end_for(why)

    @on(events.StorageFailed)
    def _on_storage_failed(self, _: str, event: events.StorageFailed) -> None:
        self.storage_failed = True
        self._end_for(event.why)

    def _end_for(self, problem: str) -> None:
        """End the run: a host or the storage cannot continue."""
        self.problem = self.problem or problem
        if self.state in (RunState.STOPPING, RunState.SETTLING):
            return
        if self.attempt_is_active:
            self._stop_others()
            return
        self._give_up(self.problem)

    # -- the user asks the run to stop ----------------------------------------------------------------------------

    @on(events.StopRequested)
    def _on_stop_requested(self, _: str, asked: events.StopRequested) -> None:
        has_ended = self.state.has_ended_early or self.state is RunState.SETTLING
        is_repeated = self.stopping.reason is not None
        if has_ended and not is_repeated and self.failures:
            self._end_failed_run()
            return
        self.stopping.reason = self.stopping.reason or asked.why
        if is_repeated or self.state.has_ended_early:
            self._stop_now()
        elif self.state is RunState.SETTLING:
            self._waits_since = self._now  # the grace begins
            self._do(self.stopping.say("the run stops when its checkpoint is stored", "ends the wait"))
        elif not self.attempt_is_active:
            self._end_early(RunState.STOPPED)
        else:
            self._stop_training()

    def _end_failed_run(self) -> None:
        """Let a run that has failed end, with the failure, which the user should see."""
        if self.stopping.forbids_retry:
            self._stop_now()
        else:
            self.stopping.forbids_retry = True
            if self.state is RunState.SAVING:
                self._stop_after_failure()

    def _stop_training(self) -> None:
        grace_s = self.request.stop_grace_s
        self._do(self.stopping.announcement())
        if self.stopping.lets_save:
            self._deadline = self.stopping.save_by = self._now + grace_s
            self._send_stop_orders(self.stopping.consensus.request_stop())
        else:
            self._stop(self.stopping.signal_order(grace_s))

    def _stop_now(self) -> None:
        """Kill the ranks. If none are left, end the wait for their checkpoints."""
        if self.state is RunState.SETTLING:
            self._end_attempt()
        else:
            self._stop(self.stopping.order())

    def _send_stop_orders(self, orders: Iterable[wire.StopDecision]) -> None:
        for order in orders:
            self._do(events.SendMessage(self._ranks[order.rank].plan.host, order))

    # -- the attempt ends -----------------------------------------------------------------------------------------

    def _stop(self, order: wire.Stop) -> None:
        """Stop all processes of the attempt."""
        latest = self._deadline if self.state is RunState.STOPPING else math.inf
        if self.state is not RunState.STOPPING:
            self._move(RunState.STOPPING)
        if not (hosts := self.living_hosts):
            self._begin_wait(RunState.SETTLING)
            return
        order = replace(order, problem=self.problem or "")
        self._deadline = min(latest, self._now + self.stopping.note_order(order, hosts))
        self._do(*(events.SendMessage(host, order) for host in hosts))

    @on(wire.StacksDone, RunState.STOPPING)
    def _on_last_stacks(self, host: str, message: wire.StacksDone) -> None:
        self.stopping.note_last_stacks(host)

    @on(wire.HostIdle)
    def _note_idle(self, host: str, *_: object) -> None:
        """Note that no process of the attempt is left on a host."""
        if self.attempt_is_active:  # else the host has sent this twice: as its workers ended, and as answer to Stop
            self._busy_hosts.pop(host, None)
            if not self._busy_hosts:
                self._begin_wait(RunState.SETTLING)

    # -- its checkpoints are completed ----------------------------------------------------------------------------

    def _begin_wait(self, state: RunState) -> None:
        """Wait in this state for what is :class:`~distrain.decisions.events.Outstanding`."""
        self._move(state)
        self._deadline, self._waits_since, self._has_announced_wait = math.inf, self._now, False

    @on(events.Outstanding, RunState.SETTLING)
    def _on_settling(self, _: str, work: events.Outstanding) -> None:
        if work.committing:
            self._wait(f"waiting until everything is written to {self._run_directory}; press Ctrl-C to stop waiting")
        elif work.uploading and self._now < (limit := self._upload_limit()):
            text = "waiting for the checkpoint that is being stored"
            self._wait(text, says_at_once=bool(self.failures), limit=limit)
        else:
            if work.lost and self.is_done:
                number, why = work.lost
                self._lose_rank(self._ranks[number], why, loses_work=True)
            self._end_attempt(is_all_stored=not work.uploading)

    def _wait(self, text: str, *, says_at_once: bool = False, limit: float = math.inf) -> None:
        """Go on waiting, until ``limit`` at the latest. Say so once, when that takes long."""
        notice_due = self._waits_since + (0.0 if says_at_once else NOTICE_AFTER_S)
        if self._has_announced_wait or not text:
            notice_due = math.inf
        if self._now >= notice_due:
            self._has_announced_wait, notice_due = True, math.inf
            self._do(events.ShowLine(text, is_news=True))
        self._deadline = min(limit, notice_due)

    def _upload_limit(self) -> float:
        """Return until when the attempt waits for uploads: less is lost by that than the time it takes.

        It waits without limit only if all work is done, and only for the grace if the user wants the run to stop.
        """
        if self.stopping.was_asked:
            return self._waits_since + self.request.stop_grace_s
        return math.inf if self.is_done and not self.problem else self._waits_since + UPLOAD_PATIENCE_S

    # -- the attempt has ended ------------------------------------------------------------------------------------

    def _end_attempt(self, *, is_all_stored: bool = False) -> None:
        """Go on after an attempt of which nothing is left: the run finishes, fails, is stopped or is restarted."""
        self._deadline = math.inf
        finished = self.is_done and is_all_stored and not self.storage_failed
        why = None if finished else self._describe_early_end()
        rollback = self._rollbacks.of(self.attempt)
        grows = bool(why) and why == self._growth.reason(self.attempt)
        self._do(events.AttemptEnded(self.attempt, tuple(self.failures), why, is_planned=grows))
        if finished:
            self._end(RunState.FINISHED)  # even if a stop was requested at the last moment
        elif self.stopping.reason is not None:
            self._end(RunState.STOPPED)
        elif rollback and not self.problem:
            self._do(rollback)
        elif grows:
            self._begin_at_once()
        elif self._may_restart():
            failure = self._describe_failure()
            self.earlier_attempts.append(f"attempt {self.attempt} before: {failure.splitlines()[0]}")
            self._do(events.ShowLine(failure))
            self._restart()
        else:
            assert self.plan is not None
            losses = self._host_pool.describe_losses(self.plan.hosts)
            may_restart = bool(self.request.failure_config.max_failures)
            self.problem = self.problem or lost_host_error(losses, may_restart=may_restart)
            self._end(RunState.FAILED)

    def _describe_early_end(self) -> str | None:
        """Return why the attempt ended early, or None if the failure of a rank ended it."""
        if self.stopping.reason is not None:
            return f"stopped by {self.stopping.reason}"
        if self.hung is not None and not self.failures:
            return self._describe_failure()
        if rollback := self._rollbacks.of(self.attempt):
            return self.problem or str(rollback)
        return self.problem or self._growth.reason(self.attempt) or finished_early(self.failures, self._ranks.outcomes)

    def _describe_failure(self) -> str:
        log_folder = f"attempt_{self.attempt}" if self.request.keeps_logs else ""
        return failed_attempt(self.failures, self.hung, self._ranks.outcomes, log_folder)

    # -- the run is restarted, or ends ----------------------------------------------------------------------------

    def _may_restart(self) -> bool:
        if self.problem or self.stopping.forbids_retry:
            return False
        culprit = culprit_first(self.failures)[0] if self.failures else None
        reports = self._ranks[culprit.rank].reports if culprit else 0
        stranded = (self.hung.deadlock or None) if self.hung else finished_early(self.failures, self._ranks.outcomes)
        is_undone = self._growth.is_undone(self.attempt, self.failures)
        return is_undone or self.retries.allow(culprit, reports=reports, checkpoint=self.checkpoint, stranded=stranded)

    def _restart(self) -> None:
        if self._growth.is_undone(self.attempt, self.failures):
            self._begin_at_once()
            return
        delay_s = self.retries.delay_s()
        if not delay_s:
            self._begin_next_attempt()
            return
        self._move(RunState.WAITING)
        self._deadline = self._now + delay_s
        self._do(events.ShowLine(f"the next attempt starts in {delay_s:g} s"))

    @on(_Due, RunState.WAITING)
    def _begin_next_attempt(self, *_: object) -> None:
        lost_before, place = set(self._host_pool.losses), len(self._actions)
        reconnect_s = self.request.failure_config.host_wait_s
        self._search_hosts(reconnect_s=reconnect_s, wait_s=LOST_HOST_GRACE_S)
        hosts = [action.host for action in self._actions[place:] if isinstance(action, events.ConnectHost)]
        if hosts:
            again = " again" if lost_before >= set(hosts) else ""
            self._actions.insert(place, events.ShowLine(f"trying to reach {name_hosts(hosts)}{again}"))

    def _give_up(self, problem: str) -> None:
        """Let the run fail. Between two attempts, that is not because of what the ranks of the last one did."""
        self.problem = self.problem or problem
        if self.state in (RunState.CONNECTING, RunState.WAITING, RunState.SETTLING):
            self._ranks, self.hung = Ranks(), None
        self._end_early(RunState.FAILED)

    def _end_early(self, state: RunState) -> None:
        """End the run. An attempt ends with it whose ranks were never started, or cannot be ended."""
        has_attempt = self.state in (RunState.RESERVING, RunState.PREPARING, RunState.STOPPING)
        self._end(state)
        if has_attempt:
            self._do(events.AttemptEnded(self.attempt, tuple(self.failures), self._describe_early_end()))

    # -- moves ----------------------------------------------------------------------------------------------------

    def _end(self, state: RunState) -> None:
        self._deadline = math.inf
        self._move(state)

    def _move(self, new: RunState) -> None:
        note_move(self._story, f"attempt {self.attempt}", self.state, new)
        self.state = new

    def _move_rank(self, rank: Rank, new: RankState) -> None:
        note_move(self._story, f"attempt {self.attempt}, rank {rank.plan.rank}", rank.state, new)
        self._ranks.move(rank, new)


HANDLERS = table_of(RunStateMachine)
"""By kind of event and state (None: any other state): what handles it."""
MESSAGES = {kind for kind, _ in HANDLERS if issubclass(kind, wire.Message)}
"""The kinds of messages that the machine handles."""

"""The run as a state machine, driven by hand: events in, actions out, no process and no clock."""

from __future__ import annotations

import math
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.api.backend import BackendConfig
from distrain.api.config import FailureConfig, ScalingConfig
from distrain.api.job import Job
from distrain.decisions.checkpoints.actions import NewStart
from distrain.decisions.events import (
    Action,
    AttemptEnded,
    CheckpointsInProgress,
    ConnectHost,
    HangDetected,
    HostLost,
    Outstanding,
    RolledBack,
    RunRequest,
    SendMessage,
    ShowLine,
    StopRequested,
    StorageFailed,
    Tick,
)
from distrain.decisions.run.host_pool import HOST_ANSWER_TIMEOUT_S
from distrain.decisions.run.machine import (
    EXIT_TIMEOUT_S,
    LOST_HOST_GRACE_S,
    RunStateMachine,
)
from distrain.decisions.run.saving import CHECKPOINT_GRACE_S
from distrain.decisions.run.stopping import LEASE_MARGIN_S, STOP_TIMEOUT_S, TERM_GRACE_S
from distrain.decisions.states import RunState
from distrain.errors import InvalidTransition
from distrain.hosts.host import HostInfo, HostSettings
from distrain.hosts.host_info import hello_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


GRACE_S = 2.0
LEASE_S = 15.0
CONSEQUENCE = "RuntimeError: Connection closed by peer"


def request(names: list[str], workers: int, **options: Any) -> RunRequest:
    defaults: dict[str, Any] = {
        "run_id": "id", "run_name": "run", "storage_path": "/runs", "job": Job(blob=b"job", preload=("torch",)),
        "backend": BackendConfig(), "scaling": ScalingConfig(num_workers=workers), "failure_config": FailureConfig(),
        "hosts": {name: order(max(1, workers // len(names))) for name in names}, "stop_grace_s": GRACE_S,
        "argv": ["train.py"], "python_flags": [],
    }  # fmt: skip
    return RunRequest(**{**defaults, **options})


def order(slots: int, **options: Any) -> HostSettings:
    return HostSettings(**{"lease_s": LEASE_S, "slots": slots, "directory": "/work", "sys_path": ["/work"], **options})


def hello(network: str = "here", address: str = "") -> wire.Hello:
    return hello_of(HostInfo(name="", cpus=4, memory_bytes=0, network=network, address=address))


class Play:
    """A machine and what may happen to it. Rank 0 and 1 are on ``one``, 2 and 3 on ``two``."""

    def __init__(
        self, hosts: int = 1, workers: int = 2, *, orders: dict[str, HostSettings] | None = None, **options: Any
    ) -> None:
        self.hosts = ["one", "two", "three"][:hosts]
        if orders is not None:
            options["hosts"] = orders
        self.machine = RunStateMachine(request(self.hosts, workers, **options))
        self.now = 100.0
        self.outstanding = Outstanding()
        """The work with files that is not done yet."""
        self.asked = asked(self.machine.start(self.now))

    @property
    def state(self) -> RunState:
        return self.machine.state

    def happens(self, event: Any, host: str = "") -> list[Action]:
        actions = self.machine.handle(event, self.now, host)
        before = None
        while self.state.waits_for_files and self.state is not before:
            before = self.state
            actions += self.machine.handle(self.outstanding, self.now)
        return actions

    def tick(self) -> list[Action]:
        """The next deadline comes."""
        moment = self.machine.deadline()
        assert self.now < moment < math.inf
        self.now = moment
        return self.happens(Tick())

    def says(self, host: str, message: wire.Message) -> list[Action]:
        return self.happens(message, host)

    def host_of(self, rank: int) -> str:
        assert self.machine.plan is not None
        return self.machine.plan.ranks[rank].host

    def rank_says(self, kind: type[wire.Message], rank: int, **fields: Any) -> list[Action]:
        message = kind(**{"attempt": self.machine.attempt, "rank": rank, **fields})
        return self.says(self.host_of(rank), message)

    def all_ranks(self) -> range:
        assert self.machine.plan is not None
        return range(self.machine.plan.world_size)

    # -- stages, each from the one before ---

    def connect(self) -> list[Action]:
        return [action for host in self.hosts for action in self.says(host, hello())]

    def reserve(self) -> list[Action]:
        return self.says("one", wire.RendezvousPort(attempt=self.machine.attempt, port=4000))

    def enter(self) -> None:
        for rank in self.all_ranks():
            self.rank_says(wire.Running, rank)

    def run(self) -> Play:
        """Up to every rank being in train_func."""
        self.connect()
        self.begin_attempt()
        return self

    def begin_attempt(self) -> None:
        self.reserve()
        self.enter()

    def succeeds(self, rank: int, **fields: Any) -> list[Action]:
        good = {"ok": True, "stage": "run", "error": None, "traceback": "", "exit_code": 0, "body": b"value"}
        return self.rank_says(wire.Outcome, rank, **{**good, **fields})

    def raises(self, rank: int, error: str = "ValueError", **fields: Any) -> list[Action]:
        bad = {"ok": False, "stage": "run", "error": error, "traceback": "", "exit_code": 1, "body": b""}
        bad["blames_peer"] = error == CONSEQUENCE
        return self.rank_says(wire.Outcome, rank, **{**bad, **fields})

    def all_succeed(self) -> list[Action]:
        return [action for rank in self.all_ranks() for action in self.succeeds(rank)]

    def exits(self, rank: int, **fields: Any) -> list[Action]:
        return self.rank_says(wire.Exited, rank, **(fields or {"exit_code": 0}))

    def gone(self, *hosts: str) -> list[Action]:
        attempt = self.machine.attempt
        return [a for host in hosts or self.hosts for a in self.says(host, wire.HostIdle(attempt=attempt))]


def told(actions: list[Action], kind: type[wire.Message]) -> list[tuple[str, Any]]:
    """Host and message of every message of a kind."""
    return [(a.host, a.message) for a in actions if isinstance(a, SendMessage) and isinstance(a.message, kind)]


def stops(actions: list[Action]) -> dict[str, float]:
    """Hosts that are told to stop, and the grace they are given."""
    return {host: message.grace_s for host, message in told(actions, wire.Stop)}


def asked(actions: list[Action]) -> list[str]:
    """Hosts that an agent is to be started on."""
    return [action.host for action in actions if isinstance(action, ConnectHost)]


def said(actions: list[Action]) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, ShowLine))


# -- the happy path --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "text"), [(32, ""), (33, "one: 33 workers share 4 CPUs; fewer train faster")])
def test_far_more_workers_than_cpus_are_a_warning(workers: int, text: str) -> None:
    assert said(Play(workers=workers).connect()) == text


# -- what is no failure ----------------------------------------------------------------------------------------------


def test_whoever_does_not_leave_after_its_work_is_killed_and_the_run_has_not_finished() -> None:
    play = Play().run()
    play.all_succeed()
    play.exits(0)
    play.now += EXIT_TIMEOUT_S
    assert stops(play.happens(Tick())) == {"one": 0.0}
    play.exits(1, signal=9, by_us=True)
    play.gone()
    assert play.state is RunState.FAILED
    assert "rank 1 did not exit within" in (play.machine.problem or "")


# -- failures and restarts -------------------------------------------------------------------------------------------


def test_a_broken_connection_of_a_ranks_own_is_not_retried_for_ever() -> None:
    """Its peers break because of it, and may be heard first."""
    play = Play(failure_config=FailureConfig(max_failures=5)).run()
    for attempt in range(2):
        if attempt:
            play.begin_attempt()
            for late in (wire.Exited(attempt=0, rank=1, signal=9), wire.RendezvousPort(attempt=0, port=1)):
                assert play.says("one", late) == [], "it is of the attempt before"
        play.raises(0, CONSEQUENCE)
        play.raises(1, "ConnectionResetError: [Errno 104] Connection reset by peer")
        play.gone()
    assert (play.state, play.machine.retries.used) == (RunState.FAILED, 1)
    assert str(play.machine.retries.refusal).startswith("no restart: the same rank has failed twice")


# -- a checkpoint that is being stored when a rank fails ---------------------------------------------------------------


def saving(play: Play, parts: Iterable[tuple[int, int]] = (), expected: Iterable[int] = ()) -> list[Action]:
    """Actions of the machine for checkpoints that ranks are storing, or are expected to report."""
    play.outstanding = Outstanding(
        saving=CheckpointsInProgress(frozenset(parts), dict.fromkeys(expected, 1), within_s=WITHIN_S)
    )
    return play.happens(Tick())


WITHIN_S = 60.0


def play_that_waits(*storing: tuple[int, int], **options: Any) -> Play:
    """Rank 3 of 4 on two hosts has raised while others were storing."""
    play = Play(hosts=2, workers=4, **options).run()
    saving(play, storing or {(0, 1)})
    assert stops(play.raises(3)) == {}
    return play


def test_nobody_is_stopped_before_the_checkpoint_is_stored() -> None:
    play = play_that_waits((0, 1), (2, 1))
    assert saving(play, {(2, 1)}) == []
    assert stops(saving(play)) == {"one": 0.0, "two": 0.0}
    play.gone()
    assert play.state is RunState.FAILED
    assert [failure.rank for failure in play.machine.failures] == [3]


def test_the_wait_for_a_checkpoint_is_bounded() -> None:
    play = play_that_waits()
    assert play.machine.deadline() == play.now + CHECKPOINT_GRACE_S
    play.now += CHECKPOINT_GRACE_S
    assert stops(play.happens(Tick())) == {"one": 0.0, "two": 0.0}
    assert play.machine.deadline() == play.now + GRACE_S + LEASE_S + LEASE_MARGIN_S


@pytest.mark.parametrize("event", [StopRequested("SIGINT"), StorageFailed("disk full")])
def test_the_wait_for_a_checkpoint_ends_when_the_user_stops_or_it_cannot_be_kept(event: Any) -> None:
    play = play_that_waits(failure_config=FailureConfig(max_failures=1))
    assert stops(play.happens(event)) == {"one": 0.0, "two": 0.0}
    play.gone()
    assert play.state is RunState.FAILED


def test_a_rank_that_fails_while_the_run_stops_makes_the_others_no_slower() -> None:
    play = Play(hosts=2, workers=4).run()
    play.rank_says(wire.StopVote, 0, call=0)
    play.happens(StopRequested("SIGINT"))
    limit = play.now + GRACE_S
    play.now += GRACE_S / 2
    saving(play, expected=[0])
    play.raises(3)
    assert play.state is RunState.SAVING
    assert play.machine.deadline() == limit


# -- asked to stop ---------------------------------------------------------------------------------------------------


def test_the_first_request_to_stop_leaves_the_grace() -> None:
    play = Play(hosts=2, workers=4).run()
    actions = play.happens(StopRequested("SIGINT"))
    assert stops(actions) == {"one": GRACE_S, "two": GRACE_S}
    assert said(actions) == (
        f"Ctrl-C: the run stops within {GRACE_S:g} s; no checkpoint is saved because no rank has called should_stop(). "
        "Ctrl-C again kills the workers now"
    )
    assert play.machine.deadline() == play.now + GRACE_S + TERM_GRACE_S + STOP_TIMEOUT_S


@pytest.mark.parametrize(
    ("why", "last_grace_s"), [("SIGINT", TERM_GRACE_S), ("SIGTERM", 0.0), ("SIGHUP", TERM_GRACE_S)]
)
def test_the_ranks_get_the_signal_that_came_and_sigterm_at_last(why: str, last_grace_s: float) -> None:
    [(_, stop)] = told(Play(is_script=True).run().happens(StopRequested(why)), wire.Stop)
    assert (stop.signal, stop.grace_s, stop.last_grace_s) == (why, GRACE_S, last_grace_s)


def test_without_a_grace_the_ranks_get_no_signal_but_sigkill() -> None:
    [(_, stop)] = told(Play(stop_grace_s=0.0).run().happens(StopRequested("SIGINT")), wire.Stop)
    assert (stop.signal, stop.grace_s, stop.last_grace_s) == ("", 0.0, 0.0)


def test_ranks_that_end_well_after_the_signal_leave_the_run_unfinished() -> None:
    """Their handlers have saved something and exited: the next start has to continue."""
    play = Play().run()
    play.happens(StopRequested("SIGINT"))
    released = told(play.all_succeed(), wire.Release)
    assert [message.rank for _, message in released] == list(play.all_ranks())  # rank 0 may wait for the others
    for rank in play.all_ranks():
        play.exits(rank)
    play.gone()
    assert (play.state, play.machine.failures) == (RunState.STOPPED, [])
    assert play.machine.finished == []


def test_the_end_of_a_rank_that_was_told_to_end_is_no_failure() -> None:
    play = Play(workers=4).run()
    play.happens(StopRequested("SIGINT"))
    play.raises(0, "KeyboardInterrupt", exits=True)
    play.raises(1, "sys.exit(3)", exits=True)
    play.raises(2, "OSError: disk full")
    play.exits(3, exit_code=7)
    play.gone()
    assert [failure.rank for failure in play.machine.failures] == [2]


def test_asking_to_stop_during_a_failure_prevents_the_retry() -> None:
    play = Play(failure_config=FailureConfig(max_failures=5)).run()
    play.raises(0)
    assert play.happens(StopRequested("SIGINT")) == []
    assert stops(play.happens(StopRequested("SIGINT"))) == {"one": 0.0}
    play.gone()
    assert play.state is RunState.FAILED  # the failure is what the user should hear of


def test_one_of_two_hosts_lost_before_anything_started_fails_the_run() -> None:
    play = Play(hosts=2, workers=4)
    play.connect()
    play.happens(HostLost("two", "silent"))
    assert (play.state, play.machine.problem) == (RunState.FAILED, "two: silent")


# -- lost hosts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 3], ids=["starting", "running"])
def test_one_of_two_hosts_lost_stops_the_other_and_fails_the_run(stages: int) -> None:
    play = Play(hosts=2, workers=4)
    for stage in (play.connect, play.reserve, play.enter)[:stages]:
        stage()
    assert stops(play.happens(HostLost("two", "silent"))) == {"one": 0.0}
    assert play.happens(HostLost("two", "and gone")) == []
    assert play.happens(HangDetected(after_s=2.0, where=("rank 0 somewhere",), suspects=(0,))) == []
    play.gone("one")
    assert play.state is RunState.FAILED
    problem = str(play.machine.problem).splitlines()
    assert problem[0] == "two: silent"
    assert problem[1].startswith("FailureConfig(max_failures=1) lets a run continue once: on spare slots")
    assert [failure.summary for failure in play.machine.failures] == ["lost: silent"] * 2


def test_losing_a_host_without_ranks_does_not_end_the_training() -> None:
    play = Play(hosts=2, workers=1).run()
    assert play.happens(HostLost("two", "silent")) == []
    assert play.state is RunState.RUNNING


# -- rollbacks ---------------------------------------------------------------------------------------------------------

SKIP_TO = {"train": {"epoch": 1, "rows": 6}}


def test_a_failure_after_a_rollback_restarts_with_the_same_rows_left_out() -> None:
    play = Play(failure_config=FailureConfig(max_failures=1)).run()
    for rank in (0, 1):
        play.raises(rank, "Rollback: NaN", rollback={"why": "NaN", "skip_to": SKIP_TO})
    play.gone()
    play.happens(RolledBack(None, SKIP_TO))
    play.reserve()
    play.enter()
    play.raises(0)
    play.gone()
    actions = play.reserve()
    assert said(actions) == "restart 1 of 1, from scratch (no checkpoint yet)"
    [(_, start)] = told(actions, wire.Start)
    assert [spec["skip_to"] for spec in start.ranks] == [SKIP_TO] * 2


# -- restarts after the loss of a host -------------------------------------------------------------------------------


def after_a_loss(*, wait_s: float = 30.0, restarts: int = 3, **options: Any) -> tuple[Play, list[Action]]:
    """Two hosts of two slots each at least, of which ``two`` is lost; what is done when nothing is left of the
    attempt."""
    config = FailureConfig(max_failures=restarts, host_wait_s=wait_s, retry_same_failure=True)
    play = Play(hosts=2, workers=4, failure_config=config, **options).run()
    play.happens(HostLost("two", "silent"))
    return play, play.gone("one")


def elastic(least: int, most: int) -> dict[str, Any]:
    return {"scaling": ScalingConfig(num_workers=(least, most)), "orders": {"one": order(2), "two": order(2)}}


def places(play: Play) -> list[str]:
    """The host of each rank."""
    assert play.machine.plan is not None
    return [rank.host for rank in play.machine.plan.ranks]


# -- several things at once ------------------------------------------------------------------------------------------


def test_a_host_whose_ranks_have_done_their_work_is_not_missed() -> None:
    play = Play(hosts=2, workers=4, failure_config=FailureConfig(max_failures=3)).run()
    play.succeeds(2)
    play.succeeds(3)
    actions = play.happens(HostLost("two", "cut"))
    assert said(actions) == "two: its ranks had finished, so the other ranks continue without it: cut"
    assert (stops(actions), play.state) == ({}, RunState.RUNNING)
    play.succeeds(0)
    released = told(play.succeeds(1), wire.Release)
    assert [(host, message.rank) for host, message in released] == [("one", 0), ("one", 1)]
    play.gone("one")
    assert (play.state, play.machine.failures) == (RunState.FINISHED, [])


def test_a_host_whose_ranks_have_returned_is_missed_if_its_checkpoints_are_not_committed() -> None:
    play = Play(hosts=2, workers=4, failure_config=FailureConfig(max_failures=3)).run()
    play.succeeds(2)
    play.succeeds(3)
    play.exits(2)
    assert stops(play.happens(HostLost("two", "cut", owes=True))) == {"one": 0.0}
    actions = play.gone("one")
    assert asked(actions) == ["two"]
    assert "ranks 2, 3 on two were lost: cut" in said(actions)


# -- as many workers as there are slots ------------------------------------------------------------------------------


def test_a_run_does_not_wait_long_for_a_host_that_it_can_do_without() -> None:
    play, _ = after_a_loss(**elastic(1, 4))
    end = play.now + LOST_HOST_GRACE_S
    while play.state is RunState.CONNECTING:
        play.tick()
    assert (places(play), play.now) == (["one", "one"], end)
    play.begin_attempt()
    assert play.says("two", hello()) == []  # it takes part from the next restart on
    play.raises(0)
    play.gone("one")
    assert places(play) == ["one", "one", "two", "two"]


# -- growth ------------------------------------------------------------------------------------------------------------

COMMIT = NewStart("/runs/run/checkpoint_000007", is_new=True)


def play_that_may_grow(**options: Any) -> Play:
    """Two ranks train on ``one``; ``two`` was lost, and may be back."""
    scaling = ScalingConfig(num_workers=(1, 4), grow="checkpoint", **options)
    play, _ = after_a_loss(**{**elastic(1, 4), "scaling": scaling})
    while play.state is RunState.CONNECTING:
        play.tick()
    play.begin_attempt()
    play.happens(HostLost("two", "still down"))
    return play


def grown_play() -> Play:
    """``two`` is back, and four ranks are about to train from the checkpoint."""
    play = play_that_may_grow()
    play.says("two", hello())
    play.happens(COMMIT)
    play.gone("one")
    play.reserve()
    return play


def tries(play: Play, until: float) -> list[float]:
    """When a missing host is tried until then, in seconds from now on: each time in vain, and without a line."""
    began, found = play.now, []
    while play.machine.deadline() < began + until:
        actions = play.tick()
        found += [play.now - began] * len(asked(actions))
        for host in asked(actions):
            assert said(play.happens(HostLost(host, "still down"))) == said(actions) == ""
    return found


def test_missing_hosts_are_tried_more_and_more_rarely_in_silence() -> None:
    assert tries(play_that_may_grow(), 300.0) == [15.0, 45.0, 105.0, 165.0, 225.0, 285.0]


def test_without_growth_no_host_is_tried_while_ranks_train() -> None:
    play, _ = after_a_loss(**elastic(1, 4))
    while play.state is RunState.CONNECTING:
        play.tick()
    play.begin_attempt()
    assert play.machine.deadline() == math.inf
    play.says("two", hello())
    assert play.happens(COMMIT) == []


def test_the_next_checkpoint_ends_the_attempt_for_a_host_that_is_back_which_is_no_failure() -> None:
    play = play_that_may_grow()
    play.happens(COMMIT)
    play.says("two", hello())
    assert play.happens(NewStart("/elsewhere")) == [], "it was stored before, or has moved"
    assert stops(play.happens(COMMIT)) == {"one": 0.0}
    play.exits(0, exit_code=None, signal=9, by_us=True)
    actions = play.gone("one")
    [ended] = [action for action in actions if isinstance(action, AttemptEnded)]
    assert (ended.failures, ended.why, ended.is_planned) == ((), "two is back", True)
    assert said(actions) == "two is back: continuing from checkpoint_000007 with 4 workers instead of 2"
    assert places(play) == ["one", "one", "two", "two"]
    assert said(play.reserve()) == "", "no restart after a failure"
    assert play.machine.retries.used == 1, "the loss of the host"
    assert len(play.machine.earlier_attempts) == 1
    play.enter()
    assert play.happens(COMMIT) == []


@pytest.mark.parametrize("event", ["stop", "finished", "failed", "hung"])
def test_everything_else_comes_before_growth(event: str) -> None:
    play = play_that_may_grow()
    play.says("two", hello())
    if event == "stop":
        play.rank_says(wire.StopVote, 0, call=1)
        play.happens(StopRequested("SIGTERM"))
    elif event == "finished":
        play.succeeds(0)
    elif event == "failed":
        play.outstanding = Outstanding(saving=CheckpointsInProgress(frozenset({(1, 1)})))
        play.raises(0)
    else:
        play.happens(HangDetected(60.0, ()))
    before = play.state
    assert (stops(play.happens(COMMIT)), play.state) == ({}, before)


def test_ranks_that_finish_while_they_are_stopped_to_grow_end_the_run() -> None:
    play = play_that_may_grow()
    play.says("two", hello())
    play.happens(COMMIT)
    play.all_succeed()
    play.gone("one")
    assert play.state is RunState.FINISHED


def test_a_stop_while_the_attempt_ends_to_grow_ends_the_run() -> None:
    play = play_that_may_grow()
    play.says("two", hello())
    play.happens(COMMIT)
    play.happens(StopRequested("SIGINT"))
    play.gone("one")
    assert play.state is RunState.STOPPED


def test_a_new_host_that_is_lost_again_costs_no_restart_and_the_run_waits_longer_and_longer() -> None:
    play = grown_play()
    for wait_s in (60.0, 120.0, 240.0):
        play.happens(HostLost("two", "cut"))
        actions = play.gone("one")
        assert "ranks 2, 3 on two were lost: cut" in said(actions)
        assert (places(play), play.state) == (["one", "one"], RunState.RESERVING), "at once, without it"
        assert said(play.reserve()) == ""
        play.enter()
        assert play.machine.retries.used == 1
        began = play.now
        play.says("two", hello())
        play.now = began + wait_s - 0.1
        assert stops(play.happens(COMMIT)) == {}
        play.now = began + wait_s
        assert stops(play.happens(COMMIT)) == {"one": 0.0}
        play.gone("one")
        play.reserve()
    play.enter()
    play.happens(COMMIT)
    play.happens(HostLost("two", "cut"))
    play.gone("one")
    assert play.machine.retries.used == 2, "it had proved itself"


def test_a_new_host_on_which_no_rank_can_start_is_left_out() -> None:
    play = grown_play()
    actions = play.says("two", wire.HostFailed(text="no torch"))
    assert said(actions) == "two: no torch; the run continues without two"
    assert told(actions, wire.Close) == [("two", wire.Close())]
    play.happens(HostLost("two", "ended"))
    play.gone("one")
    play.begin_attempt()
    assert (places(play), play.state) == (["one", "one"], RunState.RUNNING)
    play.says("one", wire.HostFailed(text="no torch"))
    play.gone("one")
    assert (play.state, play.machine.problem) == (RunState.FAILED, "one: no torch")


def test_a_host_that_is_lost_while_the_attempt_ends_to_grow_is_named() -> None:
    play = play_that_may_grow()
    play.says("two", hello())
    play.happens(COMMIT)
    play.happens(HostLost("two", "cut"))
    assert "two is gone again: continuing from checkpoint_000007" in said(play.gone("one"))
    play.begin_attempt()
    play.says("two", hello())
    assert stops(play.happens(COMMIT)) == {}, "it waits"


def test_a_host_that_is_back_without_the_resources_is_not_used() -> None:
    play = play_that_may_grow(resources_per_worker={"CPU": 2})
    play.says("two", hello_of(HostInfo(name="", cpus=2, memory_bytes=0, network="here")))
    assert stops(play.happens(COMMIT)) == {}
    play.says("two", hello())
    assert stops(play.happens(COMMIT)) == {"one": 0.0}


# -- where ranks meet ------------------------------------------------------------------------------------------------


def meeting(first: dict[str, Any], second: dict[str, Any], *, reserved: str = "", **orders: Any) -> tuple[Play, Any]:
    """Two hosts with these HELLOs and a rank each; what was asked of the first, and what all were told."""
    hosts = {"one": order(1, **orders), "two": order(1)}
    play = Play(hosts=2, orders=hosts)
    [(_, asked)] = told([*play.says("one", hello(**first)), *play.says("two", hello(**second))], wire.ReservePort)
    started = told(play.says("one", wire.RendezvousPort(attempt=0, port=4000, address=reserved)), wire.Start)
    return play, (asked.peer, dict(started))


def where(started: dict[str, wire.Start]) -> list[tuple[str, str, Any]]:
    """Of each host: MASTER_ADDR, the address whose interface is to be taken, and the interface if we name it."""
    specs = [(message.ranks[0], message.rendezvous) for message in started.values()]
    return [(s["environment"]["MASTER_ADDR"], to, s["defaults"].get("GLOO_SOCKET_IFNAME")) for s, to in specs]


@pytest.mark.parametrize(
    ("first", "second", "options", "meet"),
    [
        (("n", "10.0.0.1"), ("n", "10.0.0.1"), {}, ("127.0.0.1", "", "lo")),
        (("a", "10.0.0.1"), ("b", "10.0.0.2"), {}, ("10.0.0.1", "10.0.0.1", None)),
        (("", "10.0.0.1"), ("", "10.0.0.2"), {}, ("10.0.0.1", "10.0.0.1", None)),
        (("a", "192.0.2.9"), ("b", "10.0.0.2"), {"reserved": "10.0.0.1"}, ("10.0.0.1", "10.0.0.1", None)),
    ],
    ids=["one machine", "where ssh has reached the first", "may be several machines", "the first without ssh"],
)
def test_ranks_meet_where_all_reach_the_first_host(
    first: tuple[str, str], second: tuple[str, str], options: dict[str, Any], meet: tuple[str, str, str | None]
) -> None:
    """Without ssh, that is the way to the second; SSH_CONNECTION is that of a user who has logged in from elsewhere."""
    hellos = [{"network": network, "address": address} for network, address in (first, second)]
    toward, started = meeting(*hellos, **options, is_local=bool(options))[1]
    assert toward == ("10.0.0.2" if options else "")
    assert where(started) == [meet] * 2


def test_an_unknown_address_is_an_error_that_says_so() -> None:
    play, (_, started) = meeting({"network": "a"}, {"network": "b"})
    assert not started
    assert "the address of one is not known" in str(play.machine.problem)


# -- too late, too much ----------------------------------------------------------------------------------------------


def test_hosts_that_do_not_answer_in_time_are_named() -> None:
    play = Play(hosts=2, workers=4)
    play.says("one", hello())
    end = play.now + HOST_ANSWER_TIMEOUT_S
    while play.state is RunState.CONNECTING:
        play.tick()
    assert (play.state, play.now) == (RunState.FAILED, end)
    assert play.machine.problem == f"two: no answer within {HOST_ANSWER_TIMEOUT_S:g} s"


def test_a_port_that_is_not_reserved_in_time_fails_the_run_with_that_reason() -> None:
    play = Play()
    play.connect()
    play.now += HOST_ANSWER_TIMEOUT_S
    play.happens(Tick())
    assert play.state is RunState.FAILED
    assert "could not be ended" not in str(play.machine.problem)


# -- illegal moves ---------------------------------------------------------------------------------------------------


def test_an_illegal_move_tells_the_story() -> None:
    play = Play().run()
    with pytest.raises(InvalidTransition) as error:
        play.rank_says(wire.Running, 0)
    text = str(error.value)
    assert "rank 0: PLANNED -> RUNNING" in text
    assert text.splitlines()[-1] == "attempt 0, rank 0: RUNNING -> RUNNING"

    with pytest.raises(InvalidTransition, match=r"CONNECTING -> RESERVING(.|\n)*RUNNING -> WAITING"):
        play.machine._move(RunState.WAITING)


# -- many hosts ------------------------------------------------------------------------------------------------------


def lines_executed(act: Callable[[], object]) -> int:
    """Count the lines of Python that a call executes, each turn of a loop included."""
    count, before = 0, sys.gettrace()

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def costs_of_a_run(hosts: int) -> list[int]:
    """The lines that each stage of a run costs, in which a host is lost, and in which all ranks fail in the end."""
    names = [f"host{number}" for number in range(hosts)]
    play = Play(
        orders={name: order(2) for name in names}, workers=2 * hosts, failure_config=FailureConfig(max_failures=9)
    )
    play.hosts = names

    def connect() -> None:
        waiting = deque(play.asked)
        while waiting:
            name = waiting.popleft()
            waiting += asked(play.says(name, hello(network=name, address=name)))

    def begin_attempt() -> None:
        play.says(names[0], wire.RendezvousPort(attempt=play.machine.attempt, port=4000))
        play.enter()

    def lose_a_host() -> None:
        play.happens(HostLost(names[1], "switched off"))
        for name in (names[0], *names[2:]):
            for rank in play.machine.plan.on(name):
                play.exits(rank.rank, signal=9, by_us=True)
            play.gone(name)
        play.says(names[1], hello(network=names[1], address=names[1]))

    def fail() -> None:
        for rank in play.all_ranks():
            play.raises(rank)
            play.exits(rank, exit_code=1)
        play.gone()

    stages = (connect, begin_attempt, lose_a_host, begin_attempt, fail, begin_attempt, play.all_succeed, play.gone)
    costs = [lines_executed(stage) for stage in stages]
    assert play.state is RunState.FINISHED
    return costs


def test_twice_the_hosts_cost_twice_the_work() -> None:
    ratios = [large / small for small, large in zip(costs_of_a_run(40), costs_of_a_run(80), strict=True)]
    assert max(ratios) < 2.1, ratios


# -- files and checkpoints are awaited -----------------------------------------------------------------------------


def waiting(play: Play, **work: bool) -> list[Action]:
    """Actions of the machine while work with files is not done yet."""
    play.outstanding = Outstanding(**work)
    return play.happens(Tick())


@pytest.mark.parametrize("work", ["verifying", "copying"])
def test_workers_start_when_the_checkpoint_is_verified_and_the_files_are_there(work: str) -> None:
    play = Play(checkpoint="/runs/run/checkpoint_000002")
    play.outstanding = Outstanding(**{work: True})
    play.connect()
    assert told(play.reserve(), wire.Start) == []
    assert play.state is RunState.PREPARING
    if work == "verifying":
        assert said(play.tick()).startswith("verifying the checkpoint checkpoint_000002, from which the run continues")
    assert play.machine.deadline() == math.inf  # the line is shown once, and nothing limits the wait
    play.happens(NewStart("/runs/run/checkpoint_000001"))
    [(_, start)] = told(waiting(play), wire.Start)
    assert start.ranks[0]["checkpoint"] == "/runs/run/checkpoint_000001"


def failed(**work: bool) -> Play:
    """A run that may restart, whose rank 1 has failed; no process is left."""
    play = Play(failure_config=FailureConfig(max_failures=1)).run()
    play.outstanding = Outstanding(**work)
    play.raises(1)
    play.gone()
    assert play.state is RunState.SETTLING
    return play


def test_the_next_attempt_starts_at_a_checkpoint_that_was_being_committed() -> None:
    play = failed(committing=True)
    assert play.machine.deadline() == play.now + 5
    assert said(play.tick()).startswith("waiting until everything is written to /runs/run")
    assert play.machine.deadline() == math.inf
    play.happens(NewStart("/runs/run/checkpoint_000003"))
    waiting(play)
    assert play.state is RunState.RESERVING
    assert said(play.reserve()).startswith("restart 1 of 1, from checkpoint_000003")


@pytest.mark.parametrize("work", ["committing", "uploading"])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_run_whose_last_checkpoint_is_not_stored_has_not_finished(work: str, *, is_repeated: bool) -> None:
    play = Play().run()
    play.all_succeed()
    play.outstanding = Outstanding(**{work: True})
    play.gone()
    play.happens(StopRequested("SIGINT"))
    if is_repeated:
        play.happens(StopRequested("SIGINT"))
    elif work == "uploading":
        play.now += GRACE_S
        play.happens(Tick())
    else:
        waiting(play)
    assert play.state is (RunState.STOPPED if is_repeated or work == "uploading" else RunState.FINISHED)

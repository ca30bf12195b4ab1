"""The run as a state machine, driven by hand: events in, actions out, no process and no clock."""

from __future__ import annotations

import signal
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from distrain import wire
from distrain.api.backend import BackendConfig
from distrain.api.config import FailureConfig, ScalingConfig
from distrain.api.job import Job
from distrain.decisions.run_machine import (
    CHECKPOINT_GRACE_S,
    EXIT_TIMEOUT_S,
    HOST_ANSWER_TIMEOUT_S,
    LEASE_MARGIN_S,
    LOST_HOST_GRACE_S,
    STOP_TIMEOUT_S,
    TERM_GRACE_S,
    Action,
    AttemptEnded,
    CheckpointAvailable,
    CheckpointsInProgress,
    ConnectHost,
    HangDetected,
    HostLost,
    HostSlow,
    MessageReceived,
    Outstanding,
    RollBack,
    RolledBack,
    RunRequest,
    RunStateMachine,
    SendMessage,
    ShowLine,
    StopRequested,
    StorageFailed,
    Tick,
)
from distrain.decisions.states import RunState
from distrain.errors import InvalidTransition
from distrain.hosts.host import HostSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distrain.hosts.world import RankPlan, WorldPlan

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


def hello(
    cpus: int = 4, gpus: int | None = None, network: str = "here", address: str = "", **interfaces: str
) -> wire.Hello:
    return wire.Hello(
        wire=1, distrain="0", python="3.11", pid=1, cpus=cpus, memory_bytes=0, gpus=gpus,
        network=network, address=address, interfaces=interfaces,
    )  # fmt: skip


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

    def happens(self, event: Any) -> list[Action]:
        actions = self.machine.handle(event, self.now)
        before = None
        while self.state.waits_for_files and self.state is not before:
            before = self.state
            actions += self.machine.handle(self.outstanding, self.now)
        return actions

    def tick(self) -> list[Action]:
        """The next deadline comes."""
        moment = self.machine.deadline()
        assert moment is not None
        assert moment > self.now
        self.now = moment
        return self.happens(Tick())

    def says(self, host: str, message: wire.Message) -> list[Action]:
        return self.happens(MessageReceived(host, message))

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
        return self.says("one", wire.RendezvousPorts(attempt=self.machine.attempt, ports=[4000]))

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


@pytest.mark.parametrize("is_script", [False, True])
@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"signal": int(signal.SIGKILL)}, "was killed by SIGKILL (9) in its exit handlers"),
        ({"exit_code": 3}, "exited with code 3 in its exit handlers"),
        ({"exit_code": 0}, None),
    ],
)
def test_the_exit_code_of_a_script_counts_after_its_last_line(
    end: dict[str, int], words: str | None, is_script: bool
) -> None:
    play = Play(is_script=is_script).run()
    play.all_succeed()
    play.exits(0, **end)
    play.exits(1)
    play.gone()
    fails = is_script and words is not None
    assert play.state is (RunState.FAILED if fails else RunState.FINISHED)
    assert [words in failure.summary for failure in play.machine.failures if words] == [True] * fails


@pytest.mark.parametrize("is_script", [False, True])
def test_exit_handlers_that_ctrl_c_has_ended_are_no_success(is_script: bool) -> None:
    play = Play(is_script=is_script).run()
    play.all_succeed()
    assert told(play.happens(StopRequested("SIGINT")), wire.Stop)[0][1].exit_grace_s == 0.0
    play.exits(0, exit_code=130)
    play.exits(1)
    play.gone()
    assert (play.state, play.machine.failures) == (RunState.STOPPED, [])


def test_a_storage_that_fails_when_all_have_done_their_work_fails_the_run() -> None:
    play = Play(failure_config=FailureConfig(max_failures=3)).run()
    play.succeeds(0)
    assert stops(play.happens(StorageFailed("disk full"))) == {"one": 0.0}
    play.succeeds(1)
    play.gone()
    assert play.state is RunState.FAILED
    assert (play.machine.problem, play.machine.is_done) == ("disk full", True)


def test_a_storage_that_fails_after_the_end_makes_a_finished_run_a_failed_one() -> None:
    play = Play().run()
    play.all_succeed()
    play.gone()
    assert play.happens(StorageFailed("disk full")) == []
    assert (play.state, play.machine.problem) == (RunState.FAILED, "disk full")


# -- failures and restarts -------------------------------------------------------------------------------------------


def test_a_broken_connection_of_a_ranks_own_is_not_retried_for_ever() -> None:
    """Its peers break because of it, and may be heard first."""
    play = Play(failure_config=FailureConfig(max_failures=5)).run()
    for attempt in range(2):
        if attempt:
            play.begin_attempt()
            assert play.says("one", wire.Exited(attempt=0, rank=1, signal=9)) == [], "an end of the attempt before"
        play.raises(0, CONSEQUENCE)
        play.raises(1, "ConnectionResetError: [Errno 104] Connection reset by peer")
        play.gone()
    assert (play.state, play.machine.retries.used) == (RunState.FAILED, 1)
    assert str(play.machine.retries.refusal).startswith("no restart: the same rank has failed twice")


def test_a_script_may_continue_at_a_snapshot_of_its_own() -> None:
    play = Play(failure_config=FailureConfig(max_failures=1), is_script=True).run()
    play.raises(1)
    play.gone()
    expected = "restart 1 of 1, from the script's own snapshot, if it keeps one (distrain has no checkpoint)"
    assert said(play.reserve()).startswith(expected)


@pytest.mark.parametrize("path", ["/runs/run/checkpoint_000000", None])
def test_another_checkpoint_than_the_damaged_one_is_where_the_first_attempt_starts(path: str | None) -> None:
    failure_config = FailureConfig(max_failures=3)
    play = Play(failure_config=failure_config, checkpoint="/runs/run/checkpoint_000001")
    play.connect()
    play.happens(CheckpointAvailable(path))
    [(_, start)] = told(play.reserve(), wire.Start)
    assert {spec["checkpoint"] for spec in start.ranks} == {path}
    play.enter()
    play.raises(1)
    play.gone()
    play.begin_attempt()
    play.raises(1)
    play.gone()
    assert play.state is RunState.FAILED, "it has failed twice at the same place, and the replacement is no progress"


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


def play_that_expects(*expected: int) -> Play:
    """Rank 3 of 4 on two hosts has raised after a report that others are due to make."""
    play = Play(hosts=2, workers=4).run()
    saving(play, expected=expected)
    rank = "ranks 0, 2" if len(expected) > 1 else "rank 0"
    assert said(play.raises(3)) == f"rank 3 failed; waiting up to 60 s for {rank} to make as many reports"
    return play


def test_a_rank_that_is_due_to_bring_a_checkpoint_is_waited_for_while_it_brings_and_stores_it() -> None:
    play = play_that_expects(0, 2)
    assert saving(play, expected={0}) == []
    assert saving(play, {(0, 7)}) == []
    assert play.machine.deadline() == play.now + CHECKPOINT_GRACE_S
    assert stops(saving(play, {(0, 8)})) == {"one": 0.0, "two": 0.0}


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


def test_ranks_that_call_should_stop_get_the_signal_after_the_grace() -> None:
    play = Play().run()
    play.rank_says(wire.StopVote, 0)
    assert not stops(play.happens(StopRequested("SIGINT")))
    [(_, stop)] = told(play.tick(), wire.Stop)
    assert (stop.signal, stop.grace_s, stop.last_grace_s) == ("SIGINT", TERM_GRACE_S, TERM_GRACE_S)


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
    assert play.machine.summary().finished == []


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


def rolls_back(play: Play, rank: int = 0, **fields: Any) -> list[Action]:
    return play.raises(rank, "Rollback: NaN", rollback={"why": "NaN", "skip_to": SKIP_TO}, **fields)


def specs(actions: list[Action]) -> list[Any]:
    return [spec for _, start in told(actions, wire.Start) for spec in start.ranks]


def test_a_rollback_is_no_failure_and_nobody_is_blamed() -> None:
    play = Play(hosts=2, workers=4).run()  # max_failures is 0
    assert stops(rolls_back(play, 1)) == {"one": 0.0, "two": 0.0}
    assert rolls_back(play, 2) == []
    play.raises(3, CONSEQUENCE)
    actions = play.gone()
    text = "rank 1 on one asked to roll back before its first report (NaN)"
    assert [(a.failures, a.why) for a in actions if isinstance(a, AttemptEnded)] == [((), text)]
    [asked_for] = [a for a in actions if isinstance(a, RollBack)]
    assert (asked_for.rank, asked_for.skip_to) == (1, SKIP_TO)
    actions = play.happens(RolledBack("/runs/run/checkpoint_000003", SKIP_TO, "checkpoint_000004"))
    assert said(actions) == (
        f"{text}; back to checkpoint_000003, because the newer checkpoint_000004 has led to several rollbacks; the "
        "rows since then are left out (rollback 1 of 10)"
    )
    actions = play.reserve()
    assert said(actions) == ""
    assert [(spec["checkpoint"], spec["skip_to"]) for spec in specs(actions)] == [
        ("/runs/run/checkpoint_000003", SKIP_TO)
    ] * 4
    play.enter()
    play.happens(CheckpointAvailable("/runs/run/checkpoint_000005"))
    rolls_back(play)
    play.gone()
    play.happens(RolledBack("/runs/run/checkpoint_000005", {}))
    assert {(spec["checkpoint"], *spec["skip_to"]) for spec in specs(play.reserve())} == {
        ("/runs/run/checkpoint_000005",)
    }, "a newer checkpoint has positions of its own"


def test_a_failure_after_a_rollback_restarts_with_the_same_rows_left_out() -> None:
    play = Play(failure_config=FailureConfig(max_failures=1)).run()
    rolls_back(play)
    play.gone()
    play.happens(RolledBack(None, SKIP_TO))
    play.reserve()
    play.enter()
    play.raises(0)
    play.gone()
    actions = play.reserve()
    assert said(actions) == "restart 1 of 1, from scratch (no checkpoint yet)"
    assert [spec["skip_to"] for spec in specs(actions)] == [SKIP_TO] * 2


def test_a_rollback_after_a_real_failure_is_a_failure() -> None:
    play = Play(hosts=2, workers=4).run()
    play.raises(3, "ValueError: real")
    rolls_back(play)
    play.gone()
    assert play.state is RunState.FAILED


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


SPARE = {"one": order(2), "two": order(2), "three": order(2)}


def places(play: Play) -> list[str]:
    """The host of each rank."""
    assert play.machine.plan is not None
    return [rank.host for rank in play.machine.plan.ranks]


def test_spare_slots_take_the_place_of_a_lost_host() -> None:
    play, actions = after_a_loss(orders=SPARE)
    assert (play.state, asked(actions)) == (RunState.CONNECTING, ["three"])
    assert said(actions) == "ranks 2, 3 on two were lost: silent\ntrying to reach three"
    actions = play.says("three", hello())
    assert places(play) == ["one", "one", "three", "three"]
    assert said(actions) == "4 workers on one, three, without two"
    assert [host for host, _ in told(actions, wire.Prepare)] == ["three"]
    play.begin_attempt()
    play.all_succeed()
    play.gone("one", "three")
    assert play.state is RunState.FINISHED


def with_a_spare_host() -> Play:
    """A run on one and two, with the host three that is not connected."""
    play = Play(hosts=3, workers=4, orders=SPARE, failure_config=FailureConfig(on_slow="replace"))
    play.hosts.remove("three")
    return play.run()


def test_a_spare_host_takes_the_place_of_a_slow_one_and_that_is_no_failure() -> None:
    play = with_a_spare_host()
    play.happens(CheckpointAvailable("/runs/run/checkpoint_000003"))
    assert play.machine.spares_for("two") == ["three"]
    actions = play.happens(HostSlow("two", "CPU"))
    assert said(actions) == "two is slow (CPU); replaced by three at checkpoint_000003"
    assert set(stops(actions)) == {"one", "two"}
    play.raises(0, CONSEQUENCE)  # because another rank was stopped before it
    actions = play.gone("one", "two")
    assert [(a.failures, a.why) for a in actions if isinstance(a, AttemptEnded)] == [((), "two was slow: CPU")]
    assert (said(actions), asked(actions)) == ("trying to reach three", ["three"])
    actions = play.says("three", hello())
    assert (places(play), said(actions)) == (["one", "one", "three", "three"], "4 workers on one, three, without two")
    actions = play.reserve()
    assert said(actions) == ""
    assert {spec["checkpoint"] for _, start in told(actions, wire.Start) for spec in start.ranks} == {
        "/runs/run/checkpoint_000003"
    }
    play.enter()
    assert play.machine.spares_for("three") == []  # two is slow
    assert play.happens(HostSlow("three", "CPU")) == []
    play.raises(0)
    play.gone("one", "three")
    assert play.state is RunState.FAILED  # max_failures is 0


def test_a_lost_host_is_waited_for_and_then_named() -> None:
    play, _ = after_a_loss(wait_s=5.0)
    tries = 0
    while play.state is RunState.CONNECTING:
        tries += 1
        play.happens(HostLost("two", "no route"))
        if play.state is RunState.CONNECTING:
            play.now = play.machine.deadline() or 0.0
            assert asked(play.happens(Tick())) == ["two"]
    assert play.state is RunState.FAILED
    assert tries == 3  # at 0, 2 and 4 seconds
    assert str(play.machine.problem) == (
        "two: silent\n    tried again: no route\n"
        "two did not come back within 5 s (FailureConfig.host_wait_s), and the other hosts have 2 slots for 4 workers. "
        "Repair two, or give the run spare slots or num_workers=(min, max)"
    )
    assert play.machine.earlier_attempts == deque(["attempt 0 before: ranks 2, 3 on two were lost: silent"])


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


def test_each_lost_host_is_told_with_its_own_ranks_and_reason() -> None:
    play = Play(hosts=3, workers=6, failure_config=FailureConfig(max_failures=1, host_wait_s=30.0)).run()
    play.happens(HostLost("two", "cut"))
    play.happens(HostLost("three", "power"))
    told_of = said(play.gone("one"))
    assert "ranks 2, 3 on two were lost: cut; ranks 4, 5 on three were lost: power" in told_of


# -- as many workers as there are slots ------------------------------------------------------------------------------


def test_of_min_and_max_the_most_that_there_are_slots_for_start() -> None:
    assert places(Play(hosts=2, **elastic(1, 9)).run()) == ["one", "one", "two", "two"]
    assert places(Play(hosts=2, **elastic(1, 3)).run()) == ["one", "one", "two"]


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


def test_a_run_of_min_and_max_starts_without_those_who_cannot_be_reached() -> None:
    play = Play(hosts=2, **elastic(1, 4))
    play.says("one", hello())
    assert play.state is RunState.CONNECTING
    assert "without two\n    two: no route" in said(play.happens(HostLost("two", "no route")))
    assert places(play) == ["one", "one"]


# -- where ranks meet ------------------------------------------------------------------------------------------------


def meeting(first: dict[str, Any], second: dict[str, Any], *, reserved: str = "", **orders: Any) -> tuple[Play, Any]:
    """Two hosts with these HELLOs and a rank each; what was asked of the first, and what all were told."""
    hosts = {"one": order(1, **orders), "two": order(1)}
    play = Play(hosts=2, orders=hosts)
    [(_, asked)] = told([*play.says("one", hello(**first)), *play.says("two", hello(**second))], wire.ReservePorts)
    started = told(play.says("one", wire.RendezvousPorts(attempt=0, ports=[4000], address=reserved)), wire.Start)
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


def test_the_users_own_address_and_port_are_taken() -> None:
    first, second = {"network": "a", "address": "10.0.0.1"}, {"network": "b", "address": "10.0.0.2"}
    wanted = {"MASTER_ADDR": "192.168.0.1", "MASTER_PORT": "29500"}
    _, (_, started) = meeting(first, second, environment=wanted)
    assert where(started) == [("192.168.0.1", "192.168.0.1", None)] * 2
    assert {message.ranks[0]["environment"]["MASTER_PORT"] for message in started.values()} == {"29500"}


def test_ranks_of_several_machines_meet_over_the_interface_that_the_user_has_chosen() -> None:
    """Each host takes the first one of the list that it has, also the one without ssh."""
    first = {"network": "a", "address": "192.0.2.9", "eth0": "192.0.2.9", "ib1": "10.8.0.1"}
    second = {"network": "b", "address": "10.0.0.2", "ib0": "10.8.0.2", "ib1": "10.9.0.2"}
    hosts = {name: order(1, interface="ib0,ib1", is_local=name == "one") for name in ("one", "two")}
    play = Play(hosts=2, orders=hosts)
    [(_, asked)] = told([*play.says("one", hello(**first)), *play.says("two", hello(**second))], wire.ReservePorts)
    started = dict(told(play.says("one", wire.RendezvousPorts(attempt=0, ports=[4000])), wire.Start))
    assert asked.peer == ""
    assert where(started) == [("10.8.0.1", "10.8.0.1", "ib1"), ("10.8.0.1", "10.8.0.1", "ib0")]
    nccl = [message.ranks[0]["defaults"]["NCCL_SOCKET_IFNAME"] for message in started.values()]
    assert nccl == ["=ib1", "=ib0"]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_several_machines_cannot_meet_on_loopback(address: str) -> None:
    first, second = {"network": "a", "address": "10.0.0.1"}, {"network": "b", "address": "10.0.0.2"}
    play, (_, started) = meeting(first, second, environment={"MASTER_ADDR": address})
    assert not started
    assert play.state is RunState.FAILED
    problem = str(play.machine.problem)
    assert problem.startswith(f"one: rank 0 cannot be reached from two: {address} means another machine on each host")
    assert "MASTER_ADDR" in problem


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


def test_missing_resources_fail_the_run_before_anything_starts() -> None:
    play = Play(scaling=ScalingConfig(num_workers=2, use_gpu=True))
    assert play.says("one", hello(gpus=[{"name": "NVIDIA H100", "uuid": "GPU-0", "board": "GPU-0"}])) == []
    assert play.state is RunState.FAILED
    assert play.machine.resources_missing
    assert "one has 1 GPU," in str(play.machine.problem)


# -- illegal moves ---------------------------------------------------------------------------------------------------


def test_an_illegal_move_of_a_rank_tells_the_story() -> None:
    play = Play().run()
    with pytest.raises(InvalidTransition) as error:
        play.rank_says(wire.Running, 0)
    text = str(error.value)
    assert "rank 0: PLANNED -> RUNNING" in text
    assert text.splitlines()[-1] == "attempt 0, rank 0: RUNNING -> RUNNING"


def test_an_illegal_move_of_the_run_tells_the_story() -> None:
    play = Play().run()
    with pytest.raises(InvalidTransition, match=r"CONNECTING -> RESERVING(.|\n)*RUNNING -> WAITING"):
        play.machine._move(RunState.WAITING)


class _Endpoints(BackendConfig):
    """A framework whose ranks listen."""

    has_endpoints = True

    def environment(self, plan: WorldPlan, rank: RankPlan, endpoints: Sequence[str]) -> dict[str, str]:
        return {"ENDPOINTS": " ".join(endpoints)}


def test_every_rank_has_an_endpoint_on_its_own_host() -> None:
    hosts = {"one": order(2, is_local=True), "two": order(1)}
    play = Play(hosts=2, workers=3, orders=hosts, backend=_Endpoints())
    play.says("one", hello(network="a"))
    asked = told(play.says("two", hello(network="b", address="fd77::2")), wire.ReservePorts)
    assert [(host, reserve.ports, reserve.peer) for host, reserve in asked] == [("one", 3, "fd77::2"), ("two", 1, "")]
    assert (
        told(play.says("one", wire.RendezvousPorts(attempt=0, ports=[4000, 4001, 4002], address="fd77::1")), wire.Start)
        == []
    )
    started = dict(told(play.says("two", wire.RendezvousPorts(attempt=0, ports=[5000])), wire.Start))
    ranks = [spec["environment"] for message in started.values() for spec in message.ranks]
    assert {rank["ENDPOINTS"] for rank in ranks} == {"[fd77::1]:4001 [fd77::1]:4002 [fd77::2]:5000"}
    assert {(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks} == {("fd77::1", "4000")}


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
        play.says(names[0], wire.RendezvousPorts(attempt=play.machine.attempt, ports=[4000]))
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
    assert play.machine.deadline() is None  # the line is shown once, and nothing limits the wait
    play.happens(CheckpointAvailable("/runs/run/checkpoint_000001"))
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
    assert play.machine.deadline() is None
    play.happens(CheckpointAvailable("/runs/run/checkpoint_000003"))
    waiting(play)
    assert play.state is RunState.RESERVING
    assert said(play.reserve()).startswith("restart 1 of 1, from checkpoint_000003")


def test_the_next_attempt_waits_five_minutes_for_an_upload() -> None:
    play = Play(failure_config=FailureConfig(max_failures=1)).run()
    play.outstanding = Outstanding(uploading=True)
    play.raises(1)
    assert said(play.gone()) == "waiting for the checkpoint that is being stored"
    play.tick()
    assert (play.state, play.now) == (RunState.RESERVING, 400.0)


def test_the_end_of_a_run_waits_for_an_upload_without_limit() -> None:
    play = Play().run()
    play.all_succeed()
    play.outstanding = Outstanding(uploading=True)
    assert said(play.gone()) == ""
    assert said(play.tick()) == "waiting for the checkpoint that is being stored"
    assert (play.state, play.machine.deadline()) == (RunState.SETTLING, None)
    play.happens(StopRequested("SIGINT"))
    assert play.machine.deadline() == play.now + GRACE_S
    waiting(play)
    assert play.state is RunState.FINISHED


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


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_whose_last_checkpoint_is_lost_has_failed(restarts: int) -> None:
    play = Play(failure_config=FailureConfig(max_failures=restarts)).run()
    play.all_succeed()
    play.outstanding = Outstanding(uploading=True, lost=(1, "checkpoint_000004 was only in memory"))
    play.gone()
    assert play.state is RunState.SETTLING  # perhaps an older one is being stored
    play.outstanding = Outstanding(lost=(1, "checkpoint_000004 was only in memory"))
    actions = play.happens(Tick())
    if restarts:
        assert said(actions) == "rank 1 on one was lost: checkpoint_000004 was only in memory"
        assert play.state is RunState.RESERVING
        play.outstanding = Outstanding()
        play.begin_attempt()
        play.all_succeed()
        play.gone()
        assert play.state is RunState.FINISHED
    else:
        assert play.state is RunState.FAILED
        assert [failure.rank for failure in play.machine.failures] == [1]

"""The monitor of hangs: whom it asks, what it keeps, what excuses a rank, and when it ends an attempt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distrain import wire
from distrain.api.config import FailureConfig
from distrain.api.observer import Fact
from distrain.decisions.events import HangDetected
from distrain.decisions.health.hangs import Hangs
from distrain.decisions.health.standstills import HANG_S, MUTE_S

STACK = 'Thread 0x1:\n  File "/home/a.py", line 7 in load\n  File "/d/worker/main.py", line 1 in run_worker\n'


class Run:
    """A run of four ranks on one host, without a coordinator."""

    def __init__(self, config: FailureConfig | None = None, ranks: int = 4) -> None:
        self.told: list[Any] = []
        self.ended: list[HangDetected] = []
        self.now = 1000.0
        self.monitor = Hangs(
            config or FailureConfig(), hosts=lambda: ["alpha"],
            since_1970=lambda moment: moment, folder=lambda: "evidence", now=self.now,
        )  # fmt: skip
        self.monitor._begin(0, ranks)
        self.monitor.standstills.ranks.update(range(ranks))

    def do(self, what: Any, *facts: Any) -> None:
        self.monitor.now = self.now
        what(*facts)
        actions, self.monitor.actions = self.monitor.actions, []
        self.told += [action for action in actions if isinstance(action, Fact)]
        self.ended += [action for action in actions if isinstance(action, HangDetected)]

    def tick(self) -> None:
        self.do(self.monitor.tick)

    def fire(self, name: str) -> None:
        """Let the time of a timer come, and nothing else."""
        self.do(self.monitor._timers.pop(name)[1])

    def stand(self, state: str, *ranks: int, seconds: float = MUTE_S) -> None:
        place = "all_reduce (a.py:9)" if state else ""
        for rank in ranks:
            self.do(
                self.monitor.heard, "", wire.Standstill(attempt=0, rank=rank, state=state, place=place, seconds=seconds)
            )

    def three_wait(self) -> None:
        self.stand("waits", 0, 2, 3)
        self.tick()

    def answer(self, *ranks: int, idle: tuple[int, ...] = ()) -> None:
        for rank in ranks:
            stacks = wire.Dump(attempt=0, rank=rank, what="stacks", body=STACK.encode())
            self.do(self.monitor.add_record, "", stacks)
        silent = [rank for rank in range(4) if rank not in ranks] if ranks else []
        self.do(self.monitor.host_done, "alpha", wire.StacksDone(attempt=0, silent=silent, idle=list(idle)))

    def record(self, rank: int, number: int, *, pending: bool = True) -> None:
        calls = [
            {
                "process_group": ["0", "default_pg"], "collective_seq_id": one, "profiling_name": "gloo:all_reduce",
                "input_sizes": [[3]], "input_dtypes": ["Float"], "is_p2p": False,
                "retired": not pending or one < number,
            }
            for one in range(1, number + 1)
        ]  # fmt: skip
        record = {"entries": calls, "groups": {"0": [0, 1, 2, 3]}, "has_failed": False}
        dump = wire.Dump(attempt=0, rank=rank, what="flight_recorder", body=json.dumps(record).encode())
        self.do(self.monitor.add_record, "", dump)


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_rank_whose_threads_cannot_run_and_that_does_nothing_is_stuck(run: Run) -> None:
    run.three_wait()
    run.fire("answers")
    run.answer(0, 1, 2, 3, idle=(0, 1, 2, 3))
    run.answer(0, 1, 2, 3)
    run.fire("records")
    [began] = run.told
    assert began.culprits == [1]
    assert began.text == (
        "rank 1 has been stuck in native code that holds the GIL, in load at a.py:7; "
        "ranks 0, 2, 3 wait for it in all_reduce (a.py:9)"
    )


def test_a_rank_that_was_stopped_while_it_waited_is_to_blame(run: Run) -> None:
    run.stand("blocked", 0, 1, 2, 3, seconds=0.0)
    run.now += HANG_S
    run.tick()
    run.fire("records")
    assert not run.told  # the stacks may show more
    run.answer(0, 1, 3)
    assert [fact.culprits for fact in run.told] == [[2]]
    run.stand("", 2, seconds=0.0)
    assert [type(fact).__name__ for fact in run.told] == ["HangBegan", "HangEnded"]


@pytest.mark.parametrize("sign", [0, 1])
def test_a_rank_that_was_mute_is_not_accused_again(run: Run, sign: int) -> None:
    """``sign``: the rank that says first that it moves; the one that was stopped has told no standstill to end."""
    run.three_wait()
    run.fire("answers")
    run.answer(0, 2, 3)
    run.answer(0, 2, 3)
    run.fire("records")
    run.now += 20.0
    run.stand("", sign, seconds=0.0)
    assert [type(fact).__name__ for fact in run.told] == ["HangBegan", "HangEnded"]
    run.stand("", 0, 2, 3, seconds=0.0)
    run.now += 1000.0
    run.three_wait()
    run.fire("answers")
    run.answer(0, 1, 2, 3)
    assert len(run.told) == 2


def test_what_is_imported_before_the_first_worker_is_not_counted() -> None:
    run = Run(FailureConfig(hang_timeout_s=60, hang_report_s=None), ranks=0)
    for workers in ([], [], [0, 1, 2, 3]):
        assert run.monitor.deadline() == run.now + 60
        run.now += 60
        run.tick()
        run.answer(*workers)
        assert run.ended == []
    run.now += 60
    run.tick()
    run.answer(0, 1, 2, 3)
    assert [hang.after_s for hang in run.ended] == [60]


@pytest.mark.parametrize("changes", ["", "moves", "another collective", "over"])
def test_a_deadlock_ends_the_attempt_unless_it_changes(run: Run, changes: str) -> None:
    """Rank 1 finishes after its first collective, and the others wait for it in the second one."""
    run.record(1, 1, pending=False)
    run.do(run.monitor.rank_ended, wire.Outcome(attempt=0, rank=1, ok=True, stage="run", body=b""))
    run.stand("blocked", 0, 2, 3, seconds=0.0)
    run.now += HANG_S
    run.tick()
    for rank in (0, 2, 3):
        run.record(rank, 2)
    run.answer(0, 2, 3)
    run.fire("records")
    run.fire("records")
    for rank in (0, 2, 3):
        if changes == "moves":
            run.stand("", rank, seconds=0.0)
        elif changes == "over":
            run.record(rank, 2, pending=False)
        elif changes:
            run.record(rank, 3)
    run.fire("records")
    run.answer(0, 2, 3)
    assert [hang.suspects for hang in run.ended] == ([] if changes else [(1,)])


@pytest.mark.parametrize(("asks", "is_busy", "is_due"), [(False, True, True), (True, True, False), (True, False, True)])
def test_only_a_rank_that_waits_for_an_upload_is_excused_by_it(
    run: Run, asks: bool, is_busy: bool, is_due: bool
) -> None:
    """One upload that never ends must not hide the hangs of all ranks."""
    run.stand("asks" if asks else "stuck", 0)
    run.monitor.is_serving = is_busy
    assert (run.monitor.deadline() is not None) == is_due

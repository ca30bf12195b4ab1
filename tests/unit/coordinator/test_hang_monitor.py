"""The files that the monitor of hangs keeps: of a look at ranks that say nothing, and when it is asked for stacks."""

from __future__ import annotations

from typing import Any

from distrain import wire
from distrain.api.config import FailureConfig
from distrain.coordinator.hang_monitor import HangMonitor
from distrain.decisions.health.standstills import MUTE_S


class Run:
    """A run of four ranks on one host, without a coordinator. It is the loop and the evidence folder, too."""

    folder = "evidence"

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.asked = 0
        self.answers: list[str] = []
        this: Any = self
        self.monitor = HangMonitor(
            this, this, FailureConfig(), ask_for_stacks=self.ask_for_stacks, ask_for_records=lambda: None,
            on_hang=lambda hang: None, tell=lambda fact: None,
        )  # fmt: skip
        self.monitor.begin(4)
        for rank in range(4):
            self.monitor.rank_begins(rank)

    def ask_for_stacks(self) -> list[str]:
        self.asked += 1
        return ["alpha"]

    def call_in(self, name: str, delay_s: float, callback: Any) -> None:
        assert name in ("stacks", "records")

    def cancel(self, name: str) -> None:
        assert name == "stacks"

    def keep(self, what: str, rank: int, body: bytes) -> None:
        assert (what, body) == ("stacks", b"")
        self.kept.append(rank)

    def three_wait(self) -> None:
        for rank in (0, 2, 3):
            self.monitor.heard(
                wire.Standstill(attempt=0, rank=rank, state="waits", place="all_reduce (a.py:9)", seconds=MUTE_S)
            )

    def answer(self, *ranks: int) -> None:
        for rank in ranks:
            self.monitor.add_stacks(rank, b"")
        silent = [rank for rank in range(4) if rank not in ranks]
        self.monitor.host_done("alpha", wire.StacksDone(attempt=0, silent=silent))


def test_a_look_at_a_rank_that_answers_leaves_nothing_behind() -> None:
    run = Run()
    run.three_wait()
    run.monitor.tick()
    run.answer(0, 1, 2, 3)
    assert (run.asked, run.kept) == (1, [])
    run.monitor.tick()
    assert run.asked == 1  # nothing has changed


def test_stacks_that_are_asked_for_during_a_look_are_kept() -> None:
    run = Run()
    run.three_wait()
    run.monitor.tick()
    run.monitor.add_stacks(0, b"")
    run.monitor.answer(run.answers.append)
    run.answer(1, 2, 3)
    assert (run.asked, run.kept, len(run.answers)) == (1, [0, 1, 2, 3], 1)


def test_a_rank_that_does_not_answer_is_a_hang_whose_stacks_are_kept() -> None:
    run = Run()
    run.three_wait()
    run.monitor.tick()
    run.answer(0, 2, 3)
    assert (run.asked, run.kept) == (2, [])
    run.answer(0, 2, 3)
    assert run.kept == [0, 2, 3]
    run.monitor.answer(run.answers.append)
    run.answer(0, 2, 3)
    assert run.answers[0].startswith("rank 1 has not answered for 6.0 s: stopped (SIGSTOP), ")

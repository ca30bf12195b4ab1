"""Slow ranks are measured together with all others, and then their hosts are judged."""

from __future__ import annotations

from typing import Any

import pytest

from distrain import Checkpoint, wire
from distrain.api.observer import AttemptBegan, BecameSlow, Committed, Fact, TroubleBegan
from distrain.coordinator.fitness.sniff_tests import SniffTests
from distrain.coordinator.observers import Observers
from distrain.decisions.events import HostSlow
from distrain.decisions.run_status import RunStatus

COMMITTED = Committed(0, "checkpoint_000003", 3, 40, 10, 0.1, [0], {}, Checkpoint("/c"), 2.0)
GOOD = {"cpu": 2.0, "memory": 10.0}
BAD = {"cpu": 0.8, "memory": 9.0}
WHY = "CPU 0.8 TFLOP/s, 40% of the median of 1 other (2)"
COSTLY = f"beta is slow: {WHY}; it costs the run 36 min per hour"


class Run:
    """A run whose ranks 2 and 3 are on beta. It hears facts and answers, and keeps what it is told to do."""

    hears = ()

    def __init__(self, on_slow: Any = "warn", *hosts: str, spares: tuple[str, ...] = ("gamma",)) -> None:
        self.asked: list[int] = []
        self.replaced: list[HostSlow] = []
        self.confirmed: list[tuple[str, str]] = []
        self.observers = Observers(RunStatus("/runs/train", started=0.0), [self])
        self.tests = SniffTests(
            on_slow == "replace",
            self.observers,
            send=lambda message: self.asked.append(message.rank),
            spares_for=lambda host: spares,
            replace=self.replaced.append,
        )
        self.observers.add(self.tests)
        self.observers.tell(AttemptBegan(0, hosts or ("alpha", "alpha", "beta", "beta"), 0.0))

    def hear(self, fact: Fact) -> None:
        self.confirmed += [(fact.host, fact.trouble.text)] if isinstance(fact, TroubleBegan) else []

    def becomes_slow(self, rank: int = 3, host: str = "beta", place: str = "load_batch (train.py:31)") -> None:
        self.observers.tell(BecameSlow(rank, host, 2.5, "collectives", None, place, 0.6))

    def answer(self, results: dict[int, dict[str, float]], model: str = "") -> None:
        for rank, found in results.items():
            self.tests.handle("", wire.Sniffed(attempt=0, rank=rank, results=found, model=model))


def test_a_slow_host_is_confirmed_with_its_cost_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    run.becomes_slow()
    run.becomes_slow(2)
    assert run.asked == [0, 1, 2, 3]  # once
    run.answer({0: GOOD, 1: GOOD, 2: BAD})
    assert not run.confirmed
    run.answer({3: BAD})
    assert run.confirmed == [("beta", COSTLY)]
    cure = 'FailureConfig(on_slow="replace") puts a spare host in its place'
    assert f"{COSTLY}; {cure}\n" in capsys.readouterr().err
    run.observers.tell(COMMITTED)
    run.becomes_slow()  # again, in the same attempt
    assert (run.replaced, len(run.asked)) == ([], 4)


def test_it_is_replaced_at_the_next_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run("replace")
    run.becomes_slow()
    run.observers.tell(COMMITTED)
    run.answer({0: GOOD, 1: GOOD, 3: BAD})
    assert not run.replaced
    run.observers.tell(COMMITTED)  # rank 2 has not answered
    assert (run.replaced, run.confirmed) == ([HostSlow("beta", WHY)], [("beta", COSTLY)])
    assert capsys.readouterr().err == ""  # the machine says it


@pytest.mark.parametrize(
    ("place", "where"),
    [("load_batch (train.py:31)", "load_batch (train.py:31)"), ("", "`distrain profile train -r 3`")],
)
def test_a_rank_on_a_good_host_is_slow_by_its_code(capsys: pytest.CaptureFixture[str], place: str, where: str) -> None:
    run = Run("replace")
    run.becomes_slow(place=place)
    run.answer(dict.fromkeys(range(4), GOOD))
    good = f"rank 3 on beta is slow, but its host is as fast as the others (CPU, memory): look at {where}\n"
    assert good in capsys.readouterr().err
    run.observers.tell(COMMITTED)
    assert (run.confirmed, run.replaced) == ([], [])

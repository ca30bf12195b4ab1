"""Which standstills of ranks are a hang, and what is said about it."""

from __future__ import annotations

from distrain import wire
from distrain.decisions.health.standstills import HANG_S, MUTE_S, Standstills

WAITS = "all_reduce (a.py:9)"


class Run:
    """Four ranks that tell their standstills."""

    def __init__(self) -> None:
        self.standstills = Standstills(ranks={0, 1, 2, 3}, expected=4)

    def stand(self, ranks: str, state: str, place: str = WAITS, *, seconds: float = 3.0, now: float = 3.0) -> None:
        for rank in map(int, ranks):
            message = wire.Standstill(attempt=0, rank=rank, state=state, place=place, seconds=seconds)
            self.standstills.heard(message, now)

    def text(self, now: float) -> str | None:
        hang = self.standstills.hang(now)
        return None if hang is None else hang.text(now)


def test_ranks_wait_for_one_that_is_stuck() -> None:
    run = Run()
    run.stand("1", "stuck", "load_batch (a.py:4)")
    run.stand("023", "waits")
    assert run.text(HANG_S - 0.1) is None
    assert run.text(12.0) == (
        "rank 1 has been stuck in load_batch (a.py:4) for 12 s; ranks 0, 2, 3 wait for it in all_reduce (a.py:9)"
    )
    hang = run.standstills.hang(12.0)
    assert hang is not None
    assert (hang.culprits, hang.since) == ([1], 0.0)


def test_ranks_that_wait_for_each_other_are_a_hang_only_if_nothing_arrives() -> None:
    run = Run()
    run.stand("0123", "waits")
    assert run.text(100.0) is None
    run.stand("0123", "blocked")
    assert run.text(12.0) == "all ranks have been waiting for each other for 12 s: ranks 0-3 in all_reduce (a.py:9)"
    run.stand("1", "blocked", "broadcast (a.py:12)")
    assert run.text(12.0) == (
        "all ranks have been waiting for each other for 12 s: ranks 0, 2, 3 in all_reduce (a.py:9), "
        "rank 1 in broadcast (a.py:12)"
    )


def test_all_stuck_outside_of_collectives_may_wait_for_anything() -> None:
    run = Run()
    run.stand("0123", "stuck", "download (a.py:2)")
    assert run.text(100.0) is None


def test_a_rank_that_says_nothing_is_asked_and_named_if_it_does_not_answer() -> None:
    run = Run()
    run.stand("023", "waits")
    assert run.standstills.deadline() == MUTE_S
    assert run.standstills.unheard(MUTE_S - 0.1) == set()
    assert run.standstills.unheard(MUTE_S) == {1}
    run.standstills.note_mute({1})
    text = run.text(MUTE_S)
    assert text is not None
    assert text.startswith("rank 1 has not answered for 6.0 s: stopped (SIGSTOP), ")
    assert text.endswith("; ranks 0, 2, 3 wait for it in all_reduce (a.py:9)")
    run.stand("1", "")
    assert run.text(MUTE_S) is None

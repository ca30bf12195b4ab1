"""Which ranks are slow, from their samples and their numbers of reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distrain import wire
from distrain.decisions.pace import VITALS_S, Pace

if TYPE_CHECKING:
    from distrain.api.observer import BecameSlow


@dataclass
class Rank:
    host: str = "beta"
    ended: bool = False
    reports: int = 0
    step: float | None = None


class Run:
    """A run whose windows pass on demand."""

    def __init__(self, ranks: int) -> None:
        self.ranks = [Rank() for _ in range(ranks)]
        self.pace = Pace(ranks, 0.0)
        self.now = 0.0

    def window(self, own: list[float], reports: list[int] | None = None) -> list[BecameSlow]:
        """Let a window pass. ``own``: the share of its time for which each rank works and does not wait."""
        self.now += VITALS_S
        slow: list[BecameSlow] = []
        for rank, state in enumerate(self.ranks):
            state.reports += reports[rank] if reports else 10
            own_s = own[rank] * VITALS_S
            now = self.now if rank == len(self.ranks) - 1 else self.now - 1
            vitals = wire.Vitals(
                attempt=0,
                rank=rank,
                own_s=own_s,
                waiting_s=VITALS_S - own_s,
                place="load_batch (train.py:31)",
                place_s=own_s * 0.62,
            )
            slow += self.pace.heard(vitals, self.ranks, now)
        return slow


def test_a_rank_for_which_the_others_wait_is_slow_after_two_windows_and_named_once() -> None:
    run = Run(4)
    even, uneven = [0.6, 0.6, 0.6, 0.6], [0.6, 0.6, 0.9, 0.6]
    assert not run.window(even)
    run.ranks[2].step = 800
    assert not run.window(even)
    assert not run.window(uneven)
    run.ranks[2].step = 900
    [slow] = run.window(uneven)
    assert str(slow) == (
        "rank 2 on beta slows the run down (since step 800): its own work takes 1.5 times as long as that of the "
        "others, 62% of it in load_batch (train.py:31)"
    )
    assert not run.window(uneven)
    assert run.pace.slow == {2}
    assert not run.window(even)
    assert run.pace.slow == set()


def test_ranks_that_do_not_wait_for_each_other_are_compared_by_their_reports() -> None:
    run = Run(3)
    run.window([1.0, 1.0, 1.0], [10, 5, 10])
    [slow] = run.window([1.0, 1.0, 1.0], [10, 5, 10])
    assert (slow.rank, slow.factor, slow.between) == (1, 2.0, "reports")
    assert str(slow).startswith("rank 1 on beta is slow: its reports take 2 times as long as those of the others, ")

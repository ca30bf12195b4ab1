"""The engine keeps its promises in every scenario: those of some seeds of this commit, and those that it once broke."""

from __future__ import annotations

import time

import pytest

from tests.simulation.play import played
from tests.simulation.scenario import Fault, Scenario, drawn
from tests.simulation.shrink import as_test, story
from tests.tables import SEED

_SECONDS = 60.0
KEPT = [
    # A rank's first checkpoint came after num_to_keep had deleted the start, which it had not read yet.
    Scenario(seed=665, ranks=4, steps=3, step_s=(0.2, 0.2, 0.05, 0.2), mode="ASYNC", saving="some", asks_to_stop=True,
             looks=True, num_to_keep=1, max_failures=1, faults=(Fault(1.0785898325618297, "kill rank", 13, 20),)),
    # A rank that waited in get_checkpoint() for another one kept that one's hang from being named.
    drawn(22211),
    # A run that was stopped, and whose processes could not be ended, was shown as failed.
    drawn(5989),
]  # fmt: skip


def check(scenario: Scenario) -> None:
    play = played(scenario)
    assert not play.violations, f"{story(play)}\n{as_test(scenario)}"


@pytest.mark.parametrize("scenario", KEPT, ids=lambda scenario: f"seed {scenario.seed}")
def test_what_was_found_once_stays_away(scenario: Scenario) -> None:
    check(scenario)


def test_new_seeds_break_no_promise() -> None:
    end, seed = time.monotonic() + _SECONDS, SEED * 1_000_000
    while time.monotonic() < end:
        check(drawn(seed))
        seed += 1


def test_a_seed_is_replayed_exactly() -> None:
    first, second = played(drawn(SEED)), played(drawn(SEED))
    assert [text for _, text in first.world.story] == [
        text.replace(str(second.root), str(first.root)) for _, text in second.world.story
    ]
    assert first.world.now == second.world.now

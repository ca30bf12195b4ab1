"""The comparison of resumed attempts with undisturbed ones, on made-up notes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from distrain.drilling.compare import Straight
from distrain.drilling.journal import Attempt

Step = dict[str, Any]


def state(number: int, rank: int = 0) -> Step:
    """The state with which the n-th step begins, from 0. An epoch has three steps."""
    return {
        "what": "step",
        "model": {"weight": [1.0 + number, 2.0]},
        "optimizer": {"Adam.exp_avg.0": [0.1 * number, 0.2 * number]} if number else {},
        "lr": {"Adam": [0.1]},
        "scheduler": {"StepLR.last_epoch": float(number)},
        "scaler": {"GradScaler.scale": 8.0},
        "buffers": {"running_mean": [float(number), 1.0]},
        "averages": {"ema.weight": [0.5 * number, 1.0]},
        "random": {"torch": f"torch {rank} {number}", "Python": f"Python {number}"},
        "data": {"inputs": f"batch {number}"},
        "loader": {"epoch": number // 3, "batch": number % 3 + 1},
        "counters": {"step": number, "epoch": number // 3, "first": 0},
    }


def attempt(
    first: int = 0, last: int = 12, *, number: int = 0, steps: list[Step] | None = None, loss: float = 0.0, **more: Any
) -> Attempt:
    """An attempt of one rank that reports after each step."""
    steps = [state(each) for each in range(first, last)] if steps is None else steps
    ends = [{"what": "report", "saves": False, "steps": index + 1} for index in range(len(steps))]
    notes = [note for pair in zip(steps, ends, strict=True) for note in pair]
    metrics = {(0, first + index + 1): {"loss": loss + first + index, **more} for index in range(len(steps))}
    return Attempt(number=number, first=first, offset=first, notes={0: notes}, metrics=metrics)


STRAIGHT = Straight(attempt(), "report", 12).with_second(attempt())


def resumed(loss: float = 0.5, **changes: Any) -> Attempt:
    """An attempt that begins with the seventh step, some parts of whose state are others."""
    steps = [state(number) for number in range(6, 12)]
    steps[0] |= changes
    return attempt(6, number=1, steps=steps, loss=loss)


def causes(attempt: Attempt) -> list[str]:
    found = STRAIGHT.compare(attempt, STRAIGHT.start_of(attempt, 8))
    assert found.outcome == "drift"
    return [cause.name for cause in found.causes]


def test_equal_attempts_are_exact() -> None:
    found = STRAIGHT.compare(resumed(loss=0.0), 6)
    assert (found.outcome, found.text, list(found.causes)) == ("exact", "exact", [])


def test_the_first_difference_is_named_with_both_values() -> None:
    found = STRAIGHT.compare(resumed(), 6)
    assert found.text == "drifts from report 7: loss 6.5 instead of 6"
    assert [cause.name for cause in found.causes] == ["unknown"]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"optimizer": {}}, "optimizer"),
        ({"scheduler": {"StepLR.last_epoch": 0.0}}, "scheduler"),
        ({"random": {"torch": "other", "Python": "Python 6"}}, "random"),
        ({"averages": {"ema.weight": [0.0, 1.0]}}, "averages"),
        ({"data": {"inputs": "other"}, "loader": {"epoch": 0, "batch": 1}}, "sampler"),
        ({"data": {"inputs": "other"}, "loader": {"epoch": 2, "batch": 2}}, "position"),
        ({"data": {"inputs": "batch 3"}}, "sampler"),
        ({"data": {"inputs": "batch 3"}, "loader": {"epoch": 2, "batch": 2}}, "position"),
        ({"data": {"inputs": "other"}}, "sampler"),
        ({"counters": {"step": 0, "epoch": 2, "first": 6}}, "step"),
        ({"counters": {"step": 6, "epoch": 0, "first": 6}, "data": {"inputs": "other"}}, "epoch"),
        ({"counters": {"step": 6, "epoch": 1, "first": 6}, "data": {"inputs": "other"}}, "epoch"),
        ({"model": state(0)["model"]}, "not-loaded"),
        ({"model": state(5)["model"]}, "early"),
        ({"model": {"weight": [3.0, 9.0]}}, "model"),
    ],
)
def test_what_differs_at_the_start_is_the_cause(changes: dict[str, Any], cause: str) -> None:
    assert causes(resumed(**changes)) == [cause]


def test_data_that_depend_on_random_numbers_are_no_cause_of_their_own() -> None:
    assert causes(resumed(random={"torch": "a", "Python": "b"}, data={"inputs": "other"})) == ["random"]


def test_a_prefix_is_known_from_keys_that_did_not_fit() -> None:
    disturbed = resumed(model=state(0)["model"])
    misfit = {"what": "misfit", "missing": ["weight"], "unexpected": ["module.weight"]}
    disturbed.notes[0].insert(0, misfit)
    assert causes(disturbed) == ["prefix"]


def test_a_rank_that_has_the_state_of_rank_0_is_recognised() -> None:
    both = {rank: [state(number, rank) for number in range(12)] for rank in (0, 1)}
    straight = Straight(Attempt(notes=copy.deepcopy(both)), "step", 12).with_second(Attempt(notes=both))
    late = {rank: steps[6:] for rank, steps in both.items()}
    late[1][0] = {**late[1][0], "random": both[0][6]["random"]}
    late[1][1] = {**late[1][1], "model": {"weight": [0.0, 0.0]}}
    late[0][1] = {**late[0][1], "model": {"weight": [0.0, 0.0]}}
    disturbed = Attempt(number=1, notes=late)
    assert straight.start_of(disturbed, 8) == 6
    found = straight.compare(disturbed, 6)
    assert found.text == "drifts from step 8: the parameters differ"
    assert [cause.name for cause in found.causes] == ["rank-0"]


def test_buffers_of_every_rank_are_compared() -> None:
    steps = {rank: [state(number, rank) for number in range(12)] for rank in (0, 1)}
    straight = Straight(Attempt(notes=copy.deepcopy(steps)), "step", 12).with_second(Attempt(notes=steps))
    late = {rank: each[6:] for rank, each in steps.items()}
    late[1][0] = {**late[1][0], "buffers": {"running_mean": [0.0, 1.0]}}
    assert [cause.name for cause in straight.causes(Attempt(number=1, notes=late), 6)] == ["buffers"]


def test_differences_within_the_noise_are_none() -> None:
    noisy = [state(number) | {"model": {"weight": [1.001 + number, 2.0]}} for number in range(12)]
    straight = Straight(attempt(loss=10.0), "report", 12).with_second(attempt(steps=noisy, loss=10.01))
    assert not straight.is_deterministic
    assert "operations" in straight.why_noisy(attempt(steps=noisy))
    assert straight.compare(attempt(6, number=1, steps=noisy[6:], loss=10.005), 6).outcome == "noise"
    assert straight.compare(attempt(6, number=1, steps=noisy[6:], loss=11.0), 6).outcome == "drift"


def test_rounding_is_noise_if_everything_was_equal_at_the_start() -> None:
    steps = [state(number) for number in range(6, 12)]
    steps[3]["model"] = {"weight": [10.0 * (1 + 1e-7), 2.0]}
    assert STRAIGHT.compare(attempt(6, number=1, steps=steps), 6).outcome == "noise"


def test_a_metric_that_differs_although_the_models_do_not_is_not_compared() -> None:
    straight = Straight(attempt(seconds=1.5), "report", 12).with_second(attempt(seconds=1.6))
    assert straight.measured == {"seconds"}
    assert straight.is_deterministic
    assert straight.compare(attempt(6, number=1, seconds=99.0), 6).outcome == "exact"


def test_a_number_that_only_says_where_an_attempt_began_is_no_drift() -> None:
    straight = Straight(attempt(began_at=0), "report", 12).with_second(attempt(began_at=0))
    found = straight.compare(attempt(6, number=1, began_at=6), 6)
    assert found.outcome == "exact"
    assert list(found.aside) == ["`began_at` is 6 instead of 0, without an effect"]


def test_states_that_are_divided_among_ranks_are_summed_up() -> None:
    """Two ranks become one, which has it all."""
    whole = state(6) | {"model": {"weight": [7.0, 2.0, 0.0]}}
    half = state(6) | {"model": {"weight": [3.5, 2.0 / 2**0.5, 0.0]}}
    straight = Straight(Attempt(notes={0: [state(0), half], 1: [state(0), half]}), "step", 2)
    assert straight.compare_start(Attempt(number=1, notes={0: [whole]}), 1) == []
    other = whole | {"model": {"weight": [8.0, 2.0, 0.0]}}
    assert [one.name for one in straight.compare_start(Attempt(number=1, notes={0: [other]}), 1)] == ["model"]


def test_variables_that_hold_what_was_loaded_are_no_averages() -> None:
    assert causes(resumed(averages={**state(6)["averages"], "loaded.weight": [1.0, 1.0]})) == ["unknown"]

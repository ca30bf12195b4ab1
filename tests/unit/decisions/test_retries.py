"""Whether a failure is followed by another attempt, and after how long."""

from __future__ import annotations

from typing import Any

import pytest

from distrain import FailureConfig
from distrain.decisions.run.retries import RetryPolicy
from distrain.errors import RankFailure


def retries(*, is_script: bool = False, **config: Any) -> RetryPolicy:
    made = RetryPolicy(FailureConfig(**config), is_script=is_script)
    made.ever_entered = True
    return made


def failure(rank: int = 0, **fields: Any) -> RankFailure:
    defaults = {
        "host": "one", "order": 1, "summary": "ValueError: boom", "traceback": "Traceback\nline 3\nValueError: boom",
        "exit_code": 1, "consequence": False,
    }  # fmt: skip
    return RankFailure(rank=rank, **{**defaults, **fields})


KILLED = failure(kind="signal", signal=9, traceback="", summary="was killed by SIGKILL (9)")


def allow(
    made: RetryPolicy,
    culprit: RankFailure | None = KILLED,
    *,
    reports: int = 0,
    checkpoint: str | None = None,
    **more: str,
) -> bool:
    return made.allow(culprit, reports=reports, checkpoint=checkpoint, **more)


# -- the budget ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_budget_is_used_up(most: int) -> None:
    made = retries(max_failures=most)
    assert [allow(made) for _ in range(5)] == [number < most for number in range(5)]
    assert made.used == most
    assert made.refusal is None


# -- what is not worth it --------------------------------------------------------------------------------------------


def test_the_same_exception_twice_is_enough() -> None:
    made = retries(max_failures=5)
    assert allow(made, failure())
    assert not allow(made, failure())
    assert made.refusal is not None
    assert "retry_same_failure" in made.refusal
    assert made.used == 1


def test_ranks_that_are_left_waiting_twice_are_enough() -> None:
    made = retries(max_failures=-1)
    assert allow(made, None, stranded="rank 1 waits for rank 0")
    assert allow(made, None, stranded="rank 1 waits for rank 0", checkpoint="new")
    assert allow(made, None, stranded="rank 1 waits for rank 0", checkpoint="new")
    assert not allow(made, None, stranded="rank 1 waits for rank 0", checkpoint="new")
    assert "twice waited" in str(made.refusal)


def test_a_script_may_have_made_progress_unless_its_checkpoints_show_that_it_has_not() -> None:
    """It resumes from snapshots of its own, of which distrain does not know."""
    made = retries(max_failures=4, is_script=True)
    assert [allow(made, failure(), reports=2) for _ in range(5)] == [True, True, True, True, False]
    assert made.refusal is None
    made = retries(max_failures=-1, is_script=True)
    assert [allow(made, failure(), checkpoint="checkpoint 0") for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    "other",
    [
        failure(rank=1),
        failure(traceback="Traceback\nline 4\nValueError: boom"),
        failure(kind="exit", traceback=""),
        failure(consequence=True),
    ],
    ids=["another rank", "another traceback", "no exception", "a consequence"],
)
def test_what_is_not_the_same(other: RankFailure) -> None:
    made = retries(max_failures=-1)
    assert allow(made, failure())
    assert allow(made, other)


def test_numbers_in_the_text_make_a_difference_but_addresses_do_not() -> None:
    for first, second, is_other in (
        ("KeyError: <object at 0x7f12ab>", "KeyError: <object at 0x55aa00>", False),
        ("ValueError: loss is nan in step 1000", "ValueError: loss is nan in step 1001", True),
    ):
        made = retries(max_failures=-1)
        assert allow(made, failure(traceback=f"Traceback\n{first}"))
        assert allow(made, failure(traceback=f"Traceback\n{second}")) == is_other


def test_a_checkpoint_is_progress() -> None:
    made = retries(max_failures=-1)
    assert allow(made, failure(), checkpoint="checkpoint 0")
    assert allow(made, failure(), checkpoint="checkpoint 1")
    assert allow(made, failure(), checkpoint="checkpoint 1")
    assert not allow(made, failure(), checkpoint="checkpoint 1")


@pytest.mark.parametrize("culprit", [KILLED, None, failure(consequence=True), failure(kind="lost", traceback="")])
def test_what_others_do_to_us_is_retried_as_often_as_it_happens(culprit: RankFailure | None) -> None:
    made = retries(max_failures=-1)
    assert all(allow(made, culprit) for _ in range(10))


# -- when ------------------------------------------------------------------------------------------------------------


def delays(made: RetryPolicy, *checkpoints: str | None) -> list[float]:
    found = []
    for checkpoint in checkpoints:
        assert allow(made, checkpoint=checkpoint)
        found.append(made.delay_s())
    return found


def test_a_checkpoint_sets_the_delay_back() -> None:
    made = retries(max_failures=-1, backoff_s=1.0)
    assert delays(made, None, None, "a", "a", "a", "b") == [1.0, 2.0, 1.0, 2.0, 4.0, 1.0]

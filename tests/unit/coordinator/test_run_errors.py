"""The exception for every way in which a run can end early, and what its text says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distrain.coordinator.run.errors import RunErrors, exit_code_of
from distrain.decisions.events import HangDetected
from distrain.errors import (
    ControllerError,
    HangError,
    LaunchError,
    PreemptionError,
    RankFailure,
    ResourcesError,
    WorkerGroupError,
)
from tests.unit.system.test_log import assert_harmless

if TYPE_CHECKING:
    from collections.abc import Sequence

FULL = "OSError: [Errno 28] No space left on device"


def failure(rank: int = 0, **fields: Any) -> RankFailure:
    usual = {"summary": "ValueError: boom", "traceback": "", "exit_code": 1, "consequence": False}
    return RankFailure(rank=rank, host="one", order=rank, **{**usual, **fields})


def error_of(
    *,
    checkpoint: str | None = "checkpoint_000003, at step 18",
    page: str | None = "/page",
    where: Sequence[str] = (),
    **fields: Any,
) -> Any:
    stopping = SimpleNamespace(reason=fields.pop("stop_reason", None), grace_is_over=False)
    retries = SimpleNamespace(refusal=fields.pop("no_retry", None), ever_entered=fields.pop("entered", True))
    plan = SimpleNamespace(ranks=[SimpleNamespace(host="one")] * 2)
    facts = dict.fromkeys(("failures", "stopped_ranks", "finished", "earlier_attempts"), ())
    flags = dict.fromkeys(("problem", "hung", "storage_failed", "resources_missing"))
    end: Any = SimpleNamespace(**{**facts, **flags, "stopping": stopping, "retries": retries, "plan": plan, **fields})
    return RunErrors(
        end=end,
        exceptions={},
        name="run",
        is_script=False,
        facts={
            "step": "21 of 120",
            "checkpoint": checkpoint,
            "logs": "/logs",
            "page" if page else "run": page or "/runs/run",
        },
        last_lines={},
        where=where,
    ).error()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"failures": [failure()]}, WorkerGroupError),
        ({"failures": [failure()], "problem": "two: no route"}, WorkerGroupError),
        ({"failures": [failure(kind="lost")], "problem": "one: silent"}, ControllerError),
        ({"failures": [failure(kind="lost")]}, WorkerGroupError),
        ({"problem": "disk full", "storage_failed": True}, ControllerError),
        ({"failures": [failure(summary=FULL)], "problem": "disk full", "storage_failed": True}, ControllerError),
        ({"failures": [failure()], "problem": "disk full", "storage_failed": True}, WorkerGroupError),
        ({"problem": "too few GPUs", "resources_missing": True}, ResourcesError),
        ({"problem": "one: no route", "entered": False}, LaunchError),
        ({"stopped_ranks": [0, 1], "hung": HangDetected(3.0, ("rank 0 in f at a.py:1",), (1,))}, HangError),
        ({"failures": [failure()], "hung": HangDetected(3.0, ())}, WorkerGroupError),
    ],
)
def test_the_kind_of_error(fields: dict[str, Any], kind: type[BaseException]) -> None:
    assert type(error_of(**fields)) is kind


@pytest.mark.parametrize(
    "fields",
    [
        {"failures": [failure(summary="\x1b[\x002J", traceback="\x9b2J\nat\x1b[\x1b\x1b2J")]},
        {"problem": "\x1b[2J", "storage_failed": True},
        {"problem": "\x1b[2J", "resources_missing": True},
        {"problem": "\x1b[2J"},
        {"stopped_ranks": [0], "hung": HangDetected(3.0, ("rank 0 in \x1b[2J at a.py:1",), (0,))},
        {"stop_reason": "SIGTERM", "failures": [failure(summary="\x1b[2J")]},
    ],
)
def test_no_text_of_a_rank_acts_on_the_terminal_where_python_prints_the_error(fields: dict[str, Any]) -> None:
    assert_harmless(str(error_of(**fields)))


def test_a_failure_ends_with_the_earlier_attempts_the_logs_and_how_to_continue() -> None:
    error = error_of(failures=[failure()], earlier_attempts=["attempt 0 before: x"], no_retry="no restart: y")
    assert str(error).splitlines()[1:] == [
        "attempt 0 before: x",
        "no restart: y",
        "step:       21 of 120",
        "checkpoint: checkpoint_000003, at step 18",
        "logs:       /logs",
        "page:       /page",
        "continue:   start the run again with RunConfig(name='run')",
    ]


def test_another_problem_is_named_beside_the_failure_of_a_rank() -> None:
    assert "in addition: two: no route\n" in str(error_of(failures=[failure()], problem="two: no route"))
    storage = {"problem": "cannot write x", "storage_failed": True}
    assert "in addition, the storage has failed: cannot write x\n" in str(error_of(failures=[failure()], **storage))


def test_a_signal_of_the_user_is_a_preemption() -> None:
    error = error_of(stop_reason="SIGTERM", failures=[failure(1, exit_code=143), failure(0)], checkpoint=None)
    assert isinstance(error, PreemptionError)
    assert error.exit_code == 143
    lines = str(error).splitlines()
    assert lines[0] == "the run was stopped by SIGTERM"
    assert lines[1:3] == ["meanwhile, there was a failure:", "    rank 0 on one: ValueError: boom"]


def test_ctrl_c_is_a_keyboard_interrupt_and_only_other_problems_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(error_of(stop_reason="SIGINT"), KeyboardInterrupt)
    assert not capsys.readouterr().err
    assert isinstance(error_of(stop_reason="SIGINT", problem="disk full"), KeyboardInterrupt)
    assert capsys.readouterr().err == "distrain: in addition: disk full\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (KeyboardInterrupt(), 130),
        (PreemptionError("SIGHUP", exit_code=129), 129),
        (WorkerGroupError("", worker_failures={}, culprit=0, exit_code=7), 7),
        (WorkerGroupError("", worker_failures={}, culprit=0, exit_code=0), 1),
        (ControllerError(""), 1),
        (LaunchError(""), 2),
        (ResourcesError(""), 2),
        (ValueError("of a callback"), 1),
    ],
)
def test_each_error_has_its_exit_code(error: BaseException | None, code: int) -> None:
    assert exit_code_of(error) == code

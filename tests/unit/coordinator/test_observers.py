"""The port above the engine: facts reach all observers, and nobody waits for a slow one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from distrain import Checkpoint, Observer, RunConfig, ScalingConfig, UserCallback
from distrain.api.backend import BackendConfig
from distrain.api.config import RunContext
from distrain.api.observer import (
    AttemptBegan,
    AttemptEnded,
    Committed,
    Ended,
    Fact,
    Printed,
    Reported,
    ReportsJoined,
    RunBegan,
)
from distrain.api.result import Result
from distrain.coordinator import observers as module
from distrain.coordinator.observers import Observers, observers_of
from distrain.decisions.run_status import RunStatus

BEGAN = RunBegan("id", "run", "/runs/run", Path("/runs/run"), in_process=False)
ATTEMPT = AttemptBegan(0, ["here"], 1.0)
RESULT = Result(path="/runs/run", metrics={"loss": 0.5}, checkpoint=None)


COMMITTED = Committed(0, "c", 0, 1, 10, 0.1, [0], {"loss": 1.0}, Checkpoint("/c"), 2.0)
COMMITTED = Committed(0, "c", 0, 1, 10, 0.1, [0], {"loss": 1.0}, Checkpoint("/c"), 2.0)
Shown = pytest.CaptureFixture[str]


def ended(result: Result | None = RESULT) -> Ended:
    return Ended("finished", "finished", 1.0, result, None, [], None, storage_works=True)


def run_with(*callbacks: Any, monkeypatch: pytest.MonkeyPatch) -> Observers:
    """The observers of a run that shows nothing by itself."""
    monkeypatch.setattr(module, "OBSERVERS", ())
    config = RunConfig(callbacks=callbacks)
    context = RunContext(
        run_id="id",
        run_config=config,
        scaling_config=ScalingConfig(),
        backend_config=BackendConfig(),
        train_loop_config={},
    )
    status = RunStatus("/runs/run", started=0.0)
    return Observers(observers_of(context, BEGAN, status))


class Keeping(Observer):
    """Keeps what it hears, once it may."""

    def __init__(self, *kinds: type[Fact]) -> None:
        self.hears = kinds  # type: ignore[misc]
        self.may_go_on = threading.Event()
        self.heard: list[Fact] = []

    def hear(self, fact: Fact) -> None:
        self.may_go_on.wait()
        self.heard.append(fact)


def test_an_observer_hears_what_it_wants_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything, reports = Keeping(), Keeping(Reported)
    observers = run_with(everything, reports, monkeypatch=monkeypatch)
    facts = [BEGAN, ATTEMPT, *(Reported(0, n, n, {"loss": n}, (n, 9), float(n)) for n in (1, 2)), ended()]
    for fact in facts:
        observers.tell(fact)
    for one in (everything, reports):
        one.may_go_on.set()
    observers.wait(is_stopped=False)
    assert everything.heard == facts
    assert reports.heard == facts[2:4]


def test_the_end_of_a_run_waits_for_a_slow_observer_but_not_for_long(
    monkeypatch: pytest.MonkeyPatch, capsys: Shown
) -> None:
    monkeypatch.setattr(module, "_NOTICE_AFTER_S", 0.1)
    monkeypatch.setattr(module, "_WAIT_WHEN_STOPPED_S", 0.3)
    hanging, quick = Keeping(), Keeping()
    hanging.name, hanging.advice = "the pager", "call the hotline"
    quick.may_go_on.set()
    observers = run_with(hanging, quick, monkeypatch=monkeypatch)
    observers.tell(BEGAN)
    began = time.monotonic()
    observers.wait(is_stopped=True)
    assert 0.3 <= time.monotonic() - began < 2.0
    assert quick.heard == [BEGAN]
    assert capsys.readouterr().err.splitlines() == [
        "distrain: waiting for the pager; Ctrl-C ends the waiting",
        "distrain: the pager has not returned; call the hotline",
    ]
    hanging.may_go_on.set()


def test_reports_and_output_that_an_observer_is_too_slow_for_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: Shown
) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 5)
    slow = Keeping()
    observers = run_with(slow, monkeypatch=monkeypatch)
    observers.tell(ATTEMPT)
    for number in range(100):
        observers.tell(Printed(0, 1, b"line\n", float(number)))
    observers.tell(ended())
    slow.may_go_on.set()
    observers.wait(is_stopped=False)
    assert 5 <= len(slow.heard) <= 8
    assert slow.heard[-1] == ended()
    assert "Keeping was too slow, and missed " in capsys.readouterr().err


def test_an_observer_that_fails_is_shown_once_and_hears_what_follows(
    monkeypatch: pytest.MonkeyPatch, capsys: Shown
) -> None:
    class Failing(Keeping):
        def hear(self, fact: Fact) -> None:
            super().hear(fact)
            raise SystemExit("no key")

    failing = Failing()
    failing.may_go_on.set()
    observers = run_with(failing, monkeypatch=monkeypatch)
    for fact in (BEGAN, ATTEMPT, ended()):
        observers.tell(fact)
    observers.wait(is_stopped=False)
    assert len(failing.heard) == 3
    assert capsys.readouterr().err.count("Failing failed; the run continues: SystemExit: no key") == 1


# -- callbacks -------------------------------------------------------------------------------------------------------


class Recorder(UserCallback):
    def __init__(self) -> None:
        self.story: list[Any] = []
        self.threads: set[str] = set()

    def before_run(self, run_context: RunContext) -> None:
        self.story.append(("begin", run_context.run_config.callbacks == (self,) or run_context.run_id))

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.story.append(("report", list(metrics)))
        metrics.clear()

    def after_checkpoint(self, run_context: Any, checkpoint: Any, metrics: Any) -> None:
        self.story.append(("checkpoint", metrics))

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        self.story.append(("exception", worker_exceptions))

    def after_run(self, run_context: Any, result: Any, error: Any) -> None:
        self.story.append(("end", result, error))


class Raising(UserCallback):
    def before_run(self, *arguments: object) -> None:
        raise LookupError("no such door")

    def after_report(self, *arguments: object) -> None:
        raise LookupError("no such dashboard")


def test_callbacks_hear_the_story_of_a_run_even_if_another_one_raises_or_changes_what_it_gets(
    monkeypatch: pytest.MonkeyPatch, capsys: Shown
) -> None:
    first, second = Recorder(), Recorder()
    observers = run_with(Raising(), first, second, monkeypatch=monkeypatch)
    error = ValueError("boom")
    facts: list[Fact] = [BEGAN, ATTEMPT, *[ReportsJoined([{"loss": 1.0}, None], None)] * 2, COMMITTED]
    failure: Any = object()
    for fact in [
        *facts,
        AttemptEnded(0, [failure], None, lambda: {1: error}),
        AttemptEnded(1, [], None, dict),
        ended(),
    ]:
        observers.tell(fact)
    row = ("report", [{"loss": 1.0}, None])
    expected = [
        ("begin", "id"),
        row,
        row,
        ("checkpoint", {"loss": 1.0}),
        ("exception", {1: error}),
        ("end", RESULT, None),
    ]
    assert first.story == second.story == expected
    assert first.threads == {"distrain-callbacks"}
    shown = capsys.readouterr().err
    assert shown.count("Raising.after_report() failed:") == 1
    assert "LookupError: no such door" in shown
    assert "LookupError: no such dashboard" in shown


# -- when something goes wrong ---------------------------------------------------------------------------------------


def test_without_a_thread_nobody_waits_for_an_observer(monkeypatch: pytest.MonkeyPatch, capsys: Shown) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    recorder, keeping = Recorder(), Keeping()
    observers = run_with(keeping, recorder, monkeypatch=monkeypatch)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    began = time.monotonic()
    for fact in (BEGAN, *[ReportsJoined([{}], None)] * 3):
        observers.tell(fact)
    observers.end(ended())
    assert time.monotonic() - began < 3.0
    assert recorder.story[-1] == ("end", RESULT, None)
    assert capsys.readouterr().err.count("is disabled: can't start new thread") == 2

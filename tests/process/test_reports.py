"""report(): metrics arrive complete and in order, whatever happens to the worker."""

from __future__ import annotations

import enum
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import distrain
from distrain import Result, TrainingFailedError, WorkerGroupError, wire
from tests.conftest import wait_until
from tests.process.conftest import Fit, records, reported

if TYPE_CHECKING:
    from pathlib import Path

MANY = 10_000


class Phase(enum.IntEnum):
    TRAIN = 3


def test_ten_thousand_reports_in_a_tight_loop_arrive_in_order(any_fit: Fit) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        for step in range(MANY):
            distrain.report({"step": step, "square": step * step, "rank": rank, "loss": step / 7})

    result = any_fit(train)
    for rank in (0, 1):
        lines = records(result.path, rank)
        assert [line["index"] for line in lines] == list(range(1, MANY + 1))
        assert [line["metrics"] for line in lines] == [
            {"step": step, "square": step * step, "rank": rank, "loss": step / 7} for step in range(MANY)
        ]
    assert result.metrics is not None
    assert result.metrics["step"] == MANY - 1


def test_a_report_costs_the_loop_little(fit: Fit) -> None:
    def train() -> float:
        costs = []
        for step in range(300):
            time.sleep(0.0005)  # as if there were a training step
            began = time.perf_counter()
            distrain.report({"loss": 0.5, "step": step})
            costs.append(time.perf_counter() - began)
        return statistics.median(costs)

    assert fit(train).return_value < 300e-6  # the aim is 100 µs; a shared machine needs some room


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_what_was_reported_survives_the_death_of_the_worker(any_fit: Fit, number: int) -> None:
    def train() -> None:
        for step in range(500):
            distrain.report({"step": step})
        os.kill(os.getpid(), number)

    with pytest.raises(WorkerGroupError) as raised:
        any_fit(train, workers=1)
    result = raised.value.result
    assert result is not None
    assert result.metrics == {"step": 499}
    assert reported(result.path) == [{"step": step} for step in range(500)]


GOOD: list[tuple[Any, Any]] = [
    (np.float32(1.5), 1.5),
    (np.float64(2.5), 2.5),
    (np.float16(0.5), 0.5),
    (np.int64(-3), -3),
    (np.uint8(200), 200),
    (np.bool_(True), True),
    (np.array(4.0), 4.0),
    (np.array([5]), 5),
    (np.str_("text"), "text"),
    (Phase.TRAIN, 3),
    (2**70, 2**70),
    ("grüß\n\U0001f600", "grüß\n\U0001f600"),
    (None, None),
    (False, False),
    ((1, 2), [1, 2]),
    ([np.float32(0.5), {"deep": (np.int8(1),)}], [0.5, {"deep": [1]}]),
    ({"train": {"loss": np.float32(0.25)}, 3: "three"}, {"train": {"loss": 0.25}, "3": "three"}),
    ({}, {}),
    (math.inf, math.inf),
    ([1.0, -math.inf, np.float32("inf")], [1.0, -math.inf, math.inf]),
]


def report_under_a_dying_agent(config: dict[str, str]) -> None:
    """Report for as long as report() returns, while the agent is stopped and then killed."""
    agent = psutil.Process().parent().parent()  # type: ignore[union-attr]
    assert agent is not None
    made = os.open(config["made"], os.O_WRONLY | os.O_CREAT)
    for step in range(1_000_000):
        distrain.report({"step": step})
        os.pwrite(made, str(step + 1).encode(), 0)
        if step == 1000:
            agent.suspend()
            threading.Timer(0.3, agent.kill).start()


def test_few_reports_are_lost_with_the_agent(fit: Fit, tmp_path: Path) -> None:
    made = tmp_path / "made"
    with pytest.raises(TrainingFailedError) as raised:
        fit(report_under_a_dying_agent, {"made": str(made)}, workers=1)
    assert raised.value.result is not None
    kept = len(reported(raised.value.result.path))
    assert kept > 0
    assert int(made.read_text()) - kept <= wire.MOST_UNACKNOWLEDGED


def test_few_reports_are_lost_with_the_coordinator(tmp_path: Path, storage: Path) -> None:
    """It is stopped before it is killed, which leaves the worker the time to make more."""
    made, script = tmp_path / "made", tmp_path / "script.py"
    script.write_text(
        f"""
import os
import distrain

def train():
    made = os.open({str(made)!r}, os.O_WRONLY | os.O_CREAT)
    for step in range(1_000_000):
        distrain.report({{"step": step}})
        os.pwrite(made, str(step + 1).encode(), 0)

run = distrain.RunConfig(storage_path={str(storage)!r}, name="run")
distrain.DataParallelTrainer(train, scaling_config=distrain.ScalingConfig(num_workers=1), run_config=run).fit()
"""
    )
    user = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: made.exists() and int(made.read_text() or 0) > 1000, what="the first reports")
        user.send_signal(signal.SIGSTOP)
        before = None
        while (now := made.read_text()) != before:
            before = now
            time.sleep(0.2)
    finally:
        user.kill()
        user.wait()
    kept = len(reported(storage / "run"))
    assert kept > 0
    assert int(made.read_text()) - kept <= wire.MOST_UNACKNOWLEDGED


def test_metrics_come_back_as_plain_values(any_fit: Fit) -> None:
    def train() -> None:
        distrain.report({str(number): value for number, value in enumerate(values)})

    values = [value for value, _ in GOOD]
    result = any_fit(train, workers=1)
    expected = {str(number): value for number, (_, value) in enumerate(GOOD)}
    for metrics in (result.metrics, Result.from_path(result.path).metrics):
        assert metrics == expected
        assert {key: type(value) for key, value in (metrics or {}).items()} == {
            key: type(value) for key, value in expected.items()
        }


def test_nan_is_null_in_the_file_and_nan_in_the_result(fit: Fit) -> None:
    def train() -> None:
        distrain.report({"loss": math.nan, "eval": {"losses": [1.0, np.float32("nan")]}, "good": 1.0})

    result = fit(train, workers=1)
    (line,) = records(result.path)
    assert line["metrics"] == {"loss": None, "eval": {"losses": [1.0, None]}, "good": 1.0}
    assert line["nonfinite"] == {"/loss": "nan", "/eval/losses/1": "nan"}
    for metrics in (result.metrics, Result.from_path(result.path).metrics):
        assert metrics is not None
        assert math.isnan(metrics["loss"])
        assert math.isnan(metrics["eval"]["losses"][1])
        assert metrics["good"] == 1.0


def test_a_slash_in_a_name_is_not_taken_for_nesting(fit: Fit) -> None:
    def train() -> None:
        distrain.report({"eval/loss": math.nan, "eval": {"loss": 1.0}})

    metrics = Result.from_path(fit(train, workers=1).path).metrics
    assert metrics is not None
    assert math.isnan(metrics["eval/loss"])
    assert metrics["eval"] == {"loss": 1.0}


BAD: list[tuple[Any, type[Exception], str]] = [
    ({"loss": np.zeros(3)}, ValueError, "metrics['loss'] is a ndarray of shape (3,)"),
    ({"a": {"b": [np.ones((1, 2))]}}, ValueError, "metrics['a']['b'][0]"),
    ({"empty": np.zeros(0)}, ValueError, "metrics['empty']"),
    ({"thing": object()}, TypeError, "metrics['thing'] is a builtins.object"),
    ({"raw": b"bytes"}, TypeError, "metrics['raw']"),
    ({"money": Decimal("1.5")}, TypeError, "metrics['money']"),
    ({"set": {1}}, TypeError, "metrics['set']"),
    ({"complex": np.complex64(1j)}, TypeError, "metrics['complex']"),
    ({None: 1}, TypeError, "the key None"),
    ({("a", "b"): 1}, TypeError, "the key ('a', 'b')"),
    ([1, 2], TypeError, "takes a dict"),
    (0.5, TypeError, "takes a dict"),
    (None, TypeError, "takes a dict"),
]


def test_metrics_that_cannot_be_recorded_are_refused_and_the_next_report_works(fit: Fit) -> None:
    def train() -> list[tuple[str, str]]:
        refusals = []
        for value in values:
            try:
                distrain.report(value)
            except (TypeError, ValueError) as error:
                refusals.append((type(error).__name__, str(error)))
        distrain.report({"still": "works"})
        return refusals

    values = [value for value, _, _ in BAD]
    result = fit(train, workers=1)
    assert reported(result.path) == [{"still": "works"}]
    for (value, kind, part), (name, text) in zip(BAD, result.return_value, strict=True):
        assert (name, part in text) == (kind.__name__, True), (value, text)


def test_the_dict_is_copied(fit: Fit) -> None:
    def train() -> None:
        metrics: dict[str, Any] = {"step": 0, "nested": {"list": [0]}}
        for step in range(3):
            metrics["step"] = metrics["nested"]["list"][0] = step
            distrain.report(metrics)
        metrics["step"] = metrics["nested"]["list"][0] = "changed later"

    assert reported(fit(train, workers=1).path) == [{"step": s, "nested": {"list": [s]}} for s in range(3)]


def test_ranks_report_as_often_as_they_like(any_fit: Fit) -> None:
    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        for step in range(rank * 3):
            distrain.report({"step": step})

    result = any_fit(train, workers=3)
    assert [len(reported(result.path, rank)) for rank in range(3)] == [0, 3, 6]
    assert result.metrics is None


def test_the_dataframe_has_the_reports_of_rank_0(fit: Fit) -> None:
    def train() -> None:
        for epoch in range(3):
            distrain.report({"epoch": epoch, "eval": {"loss": epoch / 2}})

    frame = fit(train).metrics_dataframe
    assert frame is not None
    assert frame.to_dict("list") == {"epoch": [0, 1, 2], "eval/loss": [0.0, 0.5, 1.0]}


def test_reports_appear_on_the_console(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        for step in range(1000):
            distrain.report({"step": step, "eval": {"loss": 0.123456789}})

    fit(train)
    lines = [line for line in capsys.readouterr().err.splitlines() if "report " in line]
    assert re.fullmatch(r"distrain: report 1000(, [\d.,]+/s)?: step=999, eval/loss=0.123457", lines[-1])
    assert len(lines) < 20


@pytest.mark.parametrize("function", [distrain.get_context, distrain.get_checkpoint, lambda: distrain.report({})])
def test_outside_of_a_worker_the_functions_say_where_they_belong(function: Any) -> None:
    with pytest.raises(RuntimeError, match="only works inside a worker"):
        function()


def test_a_report_from_a_forked_child_is_refused(any_fit: Fit, tmp_path: Path) -> None:
    def train() -> str:
        if (child := os.fork()) == 0:
            try:
                distrain.report({"from": "child"})
            except RuntimeError as error:
                place.write_text(str(error))
            os._exit(0)
        os.waitpid(child, 0)
        distrain.report({"from": "worker"})
        return place.read_text()

    place = tmp_path / "answer"
    result = any_fit(train, workers=1)
    assert "child process" in result.return_value
    assert reported(result.path) == [{"from": "worker"}]


def test_reports_of_several_threads_do_not_mix(fit: Fit) -> None:
    def train() -> None:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda step: distrain.report({"step": step, "pad": "x" * 5000}), range(400)))

    result = fit(train, workers=1)
    assert sorted(metrics["step"] for metrics in reported(result.path)) == list(range(400))
    assert [line["index"] for line in records(result.path)] == list(range(1, 401))

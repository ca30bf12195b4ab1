"""All kinds of ranks get the same from a run: those of distrain, of another launcher, and this process."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import wait_until
from tests.torch import launchers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.torch.launchers import Started

KINDS = {"agents": 2, "joined": 2, "in process": 1}
"""By kind: the number of ranks."""
PREAMBLE = (
    launchers.WITHOUT_TORCH
    + """
from distrain.decisions import pace

KIND = sys.argv[2]
WORKERS = {"agents": 2, "joined": 1, "in process": 0}[KIND]

def fit(function, **failure):
    run = RunConfig(name="run", storage_path=FOLDER / "runs", failure_config=FailureConfig(**failure))
    scaling = ScalingConfig(num_workers=WORKERS)
    return DataParallelTrainer(function, backend_config=Files(), scaling_config=scaling, run_config=run).fit()

def my_rank():
    return distrain.get_context().get_world_rank()

def is_last():
    return my_rank() == distrain.get_context().get_world_size() - 1

def save(step):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"of_{my_rank()}").write_text(str(step))
        distrain.report({"step": step, "rank": my_rank()}, Checkpoint(folder))
"""
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str], Started]]:
    """Start the script as one kind of ranks."""
    started: list[Started] = []

    def start(kind: str, source: str) -> Started:
        launcher = launchers.launcher("pods") if kind == "joined" else launchers.Launcher("python", sys.executable)
        started.append(launcher.start(tmp_path, PREAMBLE + source, kind, ranks=KINDS[kind]))
        return started[-1]

    yield start
    for one in started:
        launchers.end(one)


def run_json(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "runs" / "run" / "run.json").read_text())
    return manifest


RESULT = """
def train():
    distrain.report({"step": 0, "rank": my_rank()})
    save(1)
    barrier()
    return f"of {my_rank()}"

result = fit(train)
said = {"metrics": result.metrics, "value": result.return_value, "checkpoint": result.checkpoint.path}
write()
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_report_a_checkpoint_and_the_result(start: Callable[..., Started], tmp_path: Path, kind: str) -> None:
    started = start(kind, RESULT)
    assert set(started.wait()) == {0}, started.output
    checkpoint = tmp_path / "runs" / "run" / "checkpoint_000000"
    said = json.loads((tmp_path / "rank_0.json").read_text())
    assert said == {"metrics": {"step": 1, "rank": 0}, "value": "of 0", "checkpoint": str(checkpoint)}
    assert {file.name for file in checkpoint.glob("of_*")} == {f"of_{rank}" for rank in range(KINDS[kind])}
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert sorted((line["rank"], line["index"]) for line in map(json.loads, lines)) == [
        (rank, index) for rank in range(KINDS[kind]) for index in (1, 2)
    ]
    assert run_json(tmp_path)["status"] == "finished"


HANG = """
def load_batch():
    time.sleep(3)

def train():
    distrain.report({"step": 0})
    if is_last():
        load_batch()
    barrier()

fit(train, hang_report_s=1.0)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hang_is_reported_with_the_place_of_each_rank(
    start: Callable[..., Started], tmp_path: Path, kind: str
) -> None:
    started = start(kind, HANG)
    assert set(started.wait()) == {0}, started.output
    source = (tmp_path / "script.py").read_text().splitlines()
    places = {"load_batch": source.index("    time.sleep(3)") + 1, "barrier": source.index("    barrier()") + 1}
    last = KINDS[kind] - 1
    assert "no rank has reported or printed anything for 1 s; stacks are in" in started.output
    assert f"rank {last} in load_batch at script.py:{places['load_batch']}\n" in started.output
    if last:
        assert f"rank 0 in barrier at script.py:{places['barrier']}\n" in started.output
    stacks = tmp_path / "runs" / "run" / "evidence" / "attempt_0" / "stacks" / f"rank_{last}.txt"
    assert "in load_batch" in stacks.read_text()
    stacks = tmp_path / "runs" / "run" / "evidence" / "attempt_0" / "stacks" / f"rank_{last}.txt"
    assert "in broadcast" in stacks.read_text()


FAILURE = """
def train():
    save(0)
    if is_last():
        raise ValueError("the real reason")
    barrier()

try:
    fit(train)
except TrainingFailedError as error:
    said = {
        "failures": [failure.as_json() for failure in error.failures if not failure.consequence],
        "own": repr(error.worker_failures[error.culprit]),
        "checkpoint": error.result.checkpoint.path if error.result else None,
        "traceback": error.failures[0].traceback,
    }
    write()
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_names_rank_host_and_place(start: Callable[..., Started], tmp_path: Path, kind: str) -> None:
    started = start(kind, FAILURE)
    assert set(started.wait()) == {0}, started.output
    last, [attempt] = KINDS[kind] - 1, run_json(tmp_path)["attempts"]
    said = json.loads((tmp_path / "rank_0.json").read_text())
    [failure] = said["failures"]
    [host] = attempt["hosts"]
    assert (failure["rank"], failure["host"], failure["summary"]) == (last, host, "ValueError: the real reason")
    assert said["own"] == "ValueError('the real reason')"
    assert 'raise ValueError("the real reason")' in said["traceback"]
    assert said["checkpoint"].endswith("checkpoint_000000")
    assert attempt["failure"] == f"rank {last} on {host}: ValueError: the real reason"
    error = json.loads((tmp_path / "runs" / "run" / "error.json").read_text())
    assert (error["culprit"], error["failures"][0]["rank"]) == (last, last)


STOP = """
def train():
    step = 0
    while not distrain.should_stop():
        time.sleep(0.01)
        step += 1
        if step == 3:
            (FOLDER / f"ready_{my_rank()}").touch()
    save(step)

try:
    fit(train)
except PreemptionError as error:
    said = {"text": str(error)}
    write()
    raise
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_should_stop_lets_all_ranks_save_a_checkpoint(start: Callable[..., Started], tmp_path: Path, kind: str) -> None:
    started = start(kind, STOP)
    wait_until(lambda: len(list(tmp_path.glob("ready_*"))) == KINDS[kind])
    started.processes[-1].send_signal(signal.SIGTERM)
    assert set(started.wait()) == {128 + signal.SIGTERM}, started.output
    assert run_json(tmp_path)["status"] == "aborted"
    [checkpoint] = (tmp_path / "runs" / "run").glob("checkpoint_*")
    steps = {file.name: file.read_text() for file in checkpoint.glob("of_*")}
    assert len(steps) == KINDS[kind]
    assert len(set(steps.values())) == 1
    text = json.loads((tmp_path / "rank_0.json").read_text())["text"]
    assert text.startswith("the run was stopped by SIGTERM")
    assert "checkpoint: checkpoint_000000, " in text


SLOW = """
pace.VITALS_S, pace.WINDOW_S = 0.4, 0.8

def load_batch():
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        pass

def train():
    end = time.monotonic() + 4
    while broadcast_from_rank_zero(time.monotonic() < end):
        if is_last():
            load_batch()
        barrier()

fit(train)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["agents", "joined"])
def test_a_slow_rank_is_named_with_its_place(start: Callable[..., Started], kind: str) -> None:
    started = start(kind, SLOW)
    assert set(started.wait()) == {0}, started.output
    assert "slows the run down: its own work takes " in started.output
    assert "in load_batch (script.py:" in started.output

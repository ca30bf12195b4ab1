"""All kinds of ranks get the same from a run: those of distrain, of another launcher, and this process."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

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
from distrain.decisions.health import pace

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

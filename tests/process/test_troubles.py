"""GPUs that are about to end a run: the agent of the host notices, and the rank is named."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distrain
from distrain import RunConfig, ScalingConfig
from distrain.api.backend import BackendConfig
from distrain.coordinator.run.fit import run_work
from distrain.decisions import pace
from distrain.worker.job.job import FunctionWork
from tests.nvml import make_driver

if TYPE_CHECKING:
    import pytest

SLOWED = "GPU 1 is slowed down by heat and the power supply (91 °C)"


def events_of(run: str) -> list[dict[str, Any]]:
    path = Path(run, "events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(number: int) -> None:
    """Wait until the run has so many events."""
    while len(events_of(distrain.get_context().get_trial_dir())) < number:
        time.sleep(0.02)


def test_the_rank_of_a_gpu_that_fails_is_named(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pace, "VITALS_S", 0.1)
    gpus = tmp_path / "gpus"
    gpus.write_text("gg")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(make_driver(tmp_path / "driver")))
    monkeypatch.setenv("FAKE_GPUS", str(gpus))

    def train() -> None:
        for number, states in ((1, "gb"), (2, "gg"), (4, "gs"), (6, "gg"), (7, "gl")):
            if distrain.get_context().get_world_rank() == 0:
                (tmp_path / "new").write_text(states)
                os.replace(tmp_path / "new", gpus)  # the driver reads it at any time
            wait_for(number)

    result = run_work(
        FunctionWork(function=train, config={}, backend=BackendConfig()),
        ScalingConfig(num_workers=2, use_gpu=True),
        RunConfig(storage_path=storage),
    )
    events = events_of(result.path)
    assert {(event["rank"], event["kind"]) for event in events} == {(1, "GPU")}
    full = "99% of the memory of GPU 1 is used"
    sick = ["GPU 1 has had 2 uncorrectable memory errors since its driver was loaded", SLOWED]
    assert [(event["event"], event.get("text")) for event in events] == [
        ("trouble", full),
        ("trouble_over", None),
        *(("trouble", text) for text in sick),
        *(("trouble_over", None) for _ in sick),
        ("trouble", "Fake at 0000:02:00.0 no longer answers"),
    ]
    assert capsys.readouterr().err.count("rank 1 on localhost: 99% of the memory of GPU 1 is used") == 1

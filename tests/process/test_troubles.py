"""Memory and GPUs that are about to end a run: the agent of the host notices, and the rank is named."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import RunConfig, ScalingConfig
from distrain.api.backend import BackendConfig
from distrain.coordinator.fit import run_work
from distrain.decisions.health import pace
from distrain.worker.job.job import FunctionWork
from tests.nvml import make_driver
from tests.process.conftest import SSH_THAT_EXECUTES, Fit, make_fake_ssh

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_BYTES = 512 << 20
SLOWED = "GPU 1 is slowed down by heat and the power supply (91 °C)"


def events_of(run: str) -> list[dict[str, Any]]:
    path = Path(run, "events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(number: int, act: Callable[[], object] = lambda: None) -> None:
    """Repeat ``act`` until the run has so many events."""
    while len(events_of(distrain.get_context().get_trial_dir())) < number:
        act()
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "VITALS_S", 0.1)


def test_the_rank_that_uses_most_of_a_limited_memory_is_named(
    fit: Fit, memory_group: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("memory.memsw.limit_in_bytes", "memory.limit_in_bytes"):
        if (memory_group / name).exists():
            (memory_group / name).write_text(str(LIMIT_BYTES))
    ssh = make_fake_ssh(tmp_path, f"echo $$ > {memory_group}/cgroup.procs\n{SSH_THAT_EXECUTES}")

    def train() -> None:
        hoard: list[bytearray] = []

        def fill() -> None:
            if int((memory_group / "memory.usage_in_bytes").read_text()) < 0.97 * LIMIT_BYTES:
                hoard.append(bytearray(b"x") * (8 << 20))

        if distrain.get_context().get_world_rank() == 1:
            wait_for(1, fill)
            hoard.clear()
        wait_for(2)

    result = replace(fit, transport=ssh)(train)
    trouble, over = events_of(result.path)
    assert (trouble["event"], trouble["rank"], trouble["kind"]) == ("trouble", 1, "memory")
    assert (over["event"], over["rank"], over["kind"]) == ("trouble_over", 1, "memory")
    [line] = [line for line in capsys.readouterr().err.splitlines() if "memory" in line]
    prefix, _, used = line.partition("is used, ")
    assert prefix in (
        f"distrain: rank 1 on otherhost: {share}% of the memory limit of 537 MB " for share in range(95, 101)
    )
    assert 100 < float(used.removesuffix(" MB by this rank")) < 537


def test_the_rank_of_a_gpu_that_fails_is_named(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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

"""Runs with checkpoints in memory: ranks and whole runs are killed, and memory is damaged."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import distrain
from distrain import Checkpoint, CheckpointUploadMode, FailureConfig
from distrain.worker.memory_part import MemoryParts
from tests.process.conftest import Fit
from tests.tables import SEED

MEMORY = CheckpointUploadMode.MEMORY

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/memory_kills"


@pytest.mark.parametrize(("kind", "kills"), [("rank", 3), ("flip", 1), ("all", 1), ("copies", 2)])
def test_what_was_saved_comes_back(kind: str, kills: int) -> None:
    command = [sys.executable, SCRIPT, kind, f"--kills={kills}", "--ranks=2", f"--seed={SEED % 1000}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_error_of_a_gpu_copy_is_told_as_what_it_is(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on in memory after the restart."""

    def train() -> None:
        step = checkpoint.to_dict()["step"] if (checkpoint := distrain.get_checkpoint()) else 0
        for step in range(step + 1, 5):
            if (step, distrain.get_context().attempt) == (3, 0):
                write = MemoryParts.write

                def copy() -> None:
                    raise RuntimeError("CUDA error: unspecified launch failure")

                MemoryParts.write = lambda *args: replace(write(*args), copy_from_gpu=copy)  # type: ignore[method-assign]
            distrain.report({"step": step}, Checkpoint.from_dict({"step": step}), checkpoint_upload_mode=MEMORY)

    result = Fit(storage=storage)(train, failure_config=FailureConfig(max_failures=1))
    error = capsys.readouterr().err
    assert "could not be stored: RuntimeError: CUDA error: unspecified launch failure" in error
    assert "restart 1 of 1, from checkpoint_000001" in error
    assert "from now on, they go to storage" not in error
    assert result.metrics == {"step": 4}

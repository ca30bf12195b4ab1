"""The examples, run as the README says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distrain import Result

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart.py"


def quickstart(storage: Path, epochs: int) -> subprocess.Popen[str]:
    options = ["--num-workers", "2", "--epochs", str(epochs), "--name", "digits", "--storage-path", str(storage)]
    return subprocess.Popen(
        [sys.executable, str(QUICKSTART), *options],
        cwd=storage,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def reported(run: Path) -> list[tuple[int, int]]:
    """Rank and epoch of every report, sorted."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return sorted((record["rank"], record["metrics"]["epoch"]) for record in map(json.loads, lines))


def check_a_finished_run(process: subprocess.Popen[str], run: Path, *, epochs: int, accuracy: float) -> None:
    """It has learnt something, and the checkpoint that it names holds what it has learnt."""
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert reported(run) == [(rank, epoch) for rank in (0, 1) for epoch in range(epochs)]
    result = Result.from_path(run)
    assert result.metrics is not None
    assert result.metrics["accuracy"] > accuracy
    assert result.checkpoint is not None
    assert f"checkpoint: {result.checkpoint.path}\n" in output
    loaded = re.search(r"accuracy of the loaded checkpoint: ([\d.]+)", output)
    assert loaded is not None
    assert float(loaded[1]) == pytest.approx(result.metrics["accuracy"], abs=0.01)


@pytest.mark.timeout(240)
def test_the_quickstart_learns_also_when_it_is_stopped_in_between(storage: Path) -> None:
    """The same name continues the stopped run; once that has finished, it starts another."""
    storage.mkdir()
    with quickstart(storage, epochs=2) as stopped:
        deadline = time.monotonic() + 60
        while not (storage / "digits" / "checkpoint_000000").exists():
            assert stopped.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(stopped.pid, signal.SIGTERM)
        stopped.communicate(timeout=20)
        assert stopped.returncode != 0
    assert reported(storage / "digits") == [(0, 0), (1, 0)]

    with quickstart(storage, epochs=2) as continued:
        check_a_finished_run(continued, storage / "digits", epochs=2, accuracy=0.5)
    with quickstart(storage, epochs=1) as another:
        check_a_finished_run(another, storage / "digits-2", epochs=1, accuracy=0.3)
    assert len(reported(storage / "digits")) == 4

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


def command(storage: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(QUICKSTART), "--num-workers", "2", "--storage-path", str(storage), *arguments]


def epochs(run: Path) -> list[tuple[int, int]]:
    """Rank and epoch of every report, sorted."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return sorted((record["rank"], record["metrics"]["epoch"]) for record in map(json.loads, lines))


def test_the_quickstart_learns_and_leaves_a_usable_checkpoint(storage: Path, tmp_path: Path) -> None:
    """A second run of the same name leaves the finished one alone."""
    for name, number_of_epochs in (("digits", 2), ("digits-2", 1)):
        run = subprocess.run(
            command(storage, "--name", "digits", "--epochs", str(number_of_epochs)),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert run.returncode == 0, run.stderr
        assert epochs(storage / name) == [(rank, epoch) for rank in (0, 1) for epoch in range(number_of_epochs)]
        result = Result.from_path(storage / name)
        assert result.metrics is not None
        assert result.metrics["accuracy"] > (0.5 if number_of_epochs == 2 else 0.3)
        assert result.checkpoint is not None
        assert result.checkpoint.path is not None
        assert result.checkpoint.path in run.stdout
        loaded = re.search(r"accuracy of the loaded checkpoint: ([\d.]+)", run.stdout)
        assert loaded is not None
        assert float(loaded[1]) == pytest.approx(result.metrics["accuracy"], abs=0.01)
    assert epochs(storage / "digits") == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_stopped_quickstart_goes_on_where_it_was(storage: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        command(storage, "--name", "stopped", "--epochs", "2"), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as first:
        deadline = time.monotonic() + 60
        while not (storage / "stopped" / "checkpoint_000000").exists():
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(first.pid, signal.SIGTERM)
        first.communicate(timeout=20)
        assert first.returncode not in (0, None)
    assert (0, 1) not in epochs(storage / "stopped")

    second = subprocess.run(
        command(storage, "--name", "stopped", "--epochs", "2"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert second.returncode == 0, second.stderr
    assert "checkpoint_000000" in second.stderr
    assert sorted({epoch for rank, epoch in epochs(storage / "stopped") if rank == 0}) == [0, 1]
    assert len(epochs(storage / "stopped")) == 4

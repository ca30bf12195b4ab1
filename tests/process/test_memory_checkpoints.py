"""Runs with checkpoints in memory: ranks and whole runs are killed, and memory is damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tables import SEED

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/memory_kills"


@pytest.mark.parametrize(("kind", "kills"), [("rank", 3), ("flip", 1), ("all", 1), ("copies", 2)])
def test_what_was_saved_comes_back(kind: str, kills: int) -> None:
    command = [sys.executable, SCRIPT, kind, f"--kills={kills}", "--ranks=2", f"--seed={SEED % 1000}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr

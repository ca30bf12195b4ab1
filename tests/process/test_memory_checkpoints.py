"""Runs with checkpoints in memory: ranks and whole runs are killed, and memory is damaged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tables import SEED

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/memory_kills"


@pytest.mark.parametrize(("kind", "kills"), [("rank", 4), ("flip", 2), ("all", 2)])
def test_what_was_saved_comes_back(kind: str, kills: int) -> None:
    command = [sys.executable, SCRIPT, kind, f"--kills={kills}", "--ranks=2"]
    done = subprocess.run([*command, f"--seed={SEED % 1000}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starts with other bytes than those that were saved: 0" in done.stdout
    if kind != "all":  # if everything was killed, the steps since the last checkpoint on storage are lost
        steps = {int(number) for number in re.findall(r"(\d+) steps:", done.stdout)}
        assert steps <= ({0, 1, 2} if kind == "flip" else {0, 1}), done.stdout
    if kind == "flip":
        assert "named on the console: 0\n" not in done.stdout

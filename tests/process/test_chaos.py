"""scripts/chaos, a short run: random faults leave no orphan, lose no commit, and hang nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tables import SEED

CHAOS = Path(__file__).resolve().parents[2] / "scripts" / "chaos"


@pytest.mark.timeout(240)  # a quarter of a minute on two idle cores
def test_random_faults_leave_nothing_and_lose_nothing(tmp_path: Path) -> None:
    """That no process is left is checked after every test, too."""
    command = [sys.executable, str(CHAOS), "--faults", "5", "--workers", "3", "--seed", str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("chaos: 5 faults, ")
    assert done.stdout.endswith("0 orphans, 0 lost commits, 0 hangs\n")

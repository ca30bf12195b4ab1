"""A script of Ray Data with two workers, unmodified."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_script_of_ray_data_trains_on_every_row_once_although_a_rank_fails(tmp_path: Path) -> None:
    script = Path(__file__).with_name("ray_data_script.py")
    run = subprocess.run(
        [sys.executable, "-m", "distrain.launch", "--as-ray", script, tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert found == {"seen": [[place, 8.0] for place in range(24)], "valid": 6}

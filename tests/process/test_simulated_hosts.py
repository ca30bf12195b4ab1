"""A run on many hosts, which scripts/simulate plays: the coordinator, its wire and its run directory are real."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

SIMULATE = Path(__file__).parents[2] / "scripts" / "simulate"
PHASES = ["ready", "reports", "checkpoint", "restarted", "stop"]


def simulate(folder: Path, *options: object, open_files: tuple[int, int] | None = None) -> tuple[dict[str, Any], str]:
    """Return the results of scripts/simulate, and what it has printed.

    open_files: the limits on open files under which it runs.
    """
    answer = folder / "result.json"
    done = subprocess.run(
        [sys.executable, SIMULATE, *map(str, options), "--json", answer],
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        preexec_fn=lambda: open_files and resource.setrlimit(resource.RLIMIT_NOFILE, open_files),
    )
    assert done.returncode == 0, done.stdout
    return json.loads(answer.read_text()), done.stdout


def test_300_hosts_train_store_a_checkpoint_lose_a_host_and_stop(tmp_path: Path) -> None:
    """With the limit on open files that many systems have, which is too low for them."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    options = ("--hosts", 300, "--workers-per-host", 1, "--lose", 2, "--rounds", 2)
    result, printed = simulate(tmp_path, *options, open_files=(256, hard))

    assert list(result["phases"]) == PHASES, printed
    assert result["ended_by"].startswith("KeyboardInterrupt")
    reached_again = " ".join(re.findall("trying to reach .*", printed))  # one line if both are lost at the same time
    assert len(set(re.findall(r"host\d+", reached_again))) == 2, printed
    assert "restart 1 of 3, from" in printed

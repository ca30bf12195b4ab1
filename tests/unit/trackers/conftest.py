"""A run directory that the tests write by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from distrain.storage.paths import RunPaths

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class RunDirectory:
    """Files as a coordinator writes them."""

    paths: RunPaths

    def attempts(self, *first_steps: int | None, status: str = "running") -> None:
        """Write run.json. None: the ranks of that attempt are still starting."""
        attempts = [
            {
                "attempt": n,
                "started": 1.0,
                "training": None if step is None else 2.0,
                "ended": None,
                "first_step": step or 0,
            }
            for n, step in enumerate(first_steps)
        ]
        text = {
            "name": "run",
            "status": status,
            "started": 1.0,
            "attempts": attempts,
            "distrain": "0.1",
            "run_id": "id",
        }
        config = {"train_loop_config": {"lr": 0.1}, "scaling_config": {"num_workers": 2, "hosts": None}}
        self.paths.manifest.write_text(json.dumps({**text, **config}))

    def report(self, index: int, *, attempt: int = 0, rank: int = 0, **metrics: Any) -> None:
        line = {"time": 10.0 + index, "attempt": attempt, "rank": rank, "index": index, "metrics": metrics}
        with self.paths.metrics.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    directory = RunDirectory(paths)
    directory.attempts(0)
    return directory

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

    def manifest(self) -> None:
        attempt = {"attempt": 0, "started": 1.0, "training": 2.0, "ended": None, "first_step": 0}
        text = {"name": "run", "status": "running", "started": 1.0, "attempts": [attempt], "distrain": "0.1"}
        config = {"train_loop_config": {"lr": 0.1}, "scaling_config": {"num_workers": 2, "hosts": None}}
        self.paths.manifest.write_text(json.dumps({**text, **config, "run_id": "id"}))

    def report(self, index: int, *, attempt: int = 0, rank: int = 0, **metrics: Any) -> None:
        line = {"time": 10.0 + index, "attempt": attempt, "rank": rank, "index": index, "metrics": metrics}
        with self.paths.metrics.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    directory = RunDirectory(paths)
    directory.manifest()
    return directory

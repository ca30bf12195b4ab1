"""Run directories made by hand, as a run would write them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def make_run(storage: Path, name: str, *, status: str = "finished", age_s: float = 0.0, **fields: Any) -> Path:
    """Make a run that began ``age_s`` + 60 seconds ago, with one attempt of two ranks, and ended ``age_s`` ago."""
    run = storage / name
    run.mkdir(parents=True)
    ended = time.time() - age_s
    attempt = {"attempt": 0, "started": ended - 60, "ended": ended, "hosts": {"alpha": [0], "beta": [1]}}
    manifest = {
        "name": name,
        "run_id": "id",
        "status": status,
        "started": ended - 60,
        "updated": ended,
        "attempts": [{**attempt, "checkpoint": None, "first_step": 0, "failure": None}],
        "argv": ["train.py", "--lr", "0.1"],
        **fields,
    }
    (run / "run.json").write_text(json.dumps(manifest))
    (run / ".lock").write_text("1\n")
    return run


def add_reports(run: Path, *reports: dict[str, Any], attempt: int = 0, ranks: int = 2) -> None:
    """Append reports of all ranks; rank r reports ``loss`` + r."""
    with (run / "metrics.jsonl").open("a") as file:
        for index, metrics in enumerate(reports, start=1):
            for rank in range(ranks):
                line = {"time": 100.0 + index, "attempt": attempt, "rank": rank, "index": index}
                file.write(json.dumps({**line, "metrics": {**metrics, "loss": metrics["loss"] + rank}}) + "\n")

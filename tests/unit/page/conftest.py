"""Run directories that are made by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from distrain.page import write_page

if TYPE_CHECKING:
    from pathlib import Path

STARTED = 1_790_000_000.0


@dataclass
class Run:
    """A run directory. Times are given in seconds since its beginning."""

    root: Path

    def manifest(self, *attempts: dict[str, Any], status: str = "finished", took: float = 100.0, **fields: Any) -> None:
        made = []
        for number, attempt in enumerate(attempts):
            usual = {"attempt": number, "hosts": {"alpha": [0, 1], "beta": [2, 3]}, "checkpoint": None, "first_step": 0}
            given = {name: attempt[name] for name in ("started", "training", "ended")}
            timed = {name: None if time is None else STARTED + time for name, time in given.items()}
            made.append({"failure": None, **usual, **attempt, **timed})
        text = {"name": self.root.name, "run_id": "id", "status": status, "started": STARTED, "updated": STARTED + took}
        self.write("run.json", {**text, "attempts": made, **fields})

    def write(self, name: str, content: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    def report(self, time: float, index: int, *, rank: int = 0, attempt: int = 0, **fields: Any) -> None:
        line = {"time": STARTED + time, "attempt": attempt, "rank": rank, "index": index, "metrics": {}, **fields}
        order = ("time", "attempt", "rank", "index", "progress", "waits", "metrics", "nonfinite")
        with (self.root / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({n: line[n] for n in order if n in line}, separators=(",", ":")) + "\n")

    def event(self, event: str, time: float, *, attempt: int = 0, **fields: Any) -> None:
        line = {"time": STARTED + time, "event": event, "attempt": attempt, **fields}
        with (self.root / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def page(self) -> str:
        return write_page(self.root).read_text()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    root = tmp_path / "my-run"
    root.mkdir()
    return Run(root)


@pytest.fixture
def restarted(run: Run) -> Run:
    """A run of two attempts and 4 ranks: 10 of 30 steps were repeated, rank 3 failed at last."""
    why = "rank 3 on beta: RuntimeError: CUDA out of memory (train.py:88)"
    second = {"started": 50.0, "training": 55.0, "ended": 100.0, "checkpoint": "checkpoint_000000", "first_step": 20}
    first = {"started": 2.0, "training": 10.0, "ended": 45.0, "failure": why}
    run.manifest(first, {**second, "failure": why}, status="failed", argv=["train.py", "--lr", "0.1"])
    for attempt, (begin, first_step) in enumerate(((10, 0), (55, 20))):
        for index in range(1, 31):
            for rank in range(4):
                step = first_step + index
                metrics = {"loss": 1 / step, "eval": {"score": step * 1.0}, "text": "x", "attempt": attempt}
                waits = {"data": 0.1} if rank == 2 else {"checkpoint": 0.05}
                run.report(begin + index, index, rank=rank, attempt=attempt, metrics=metrics, waits=waits)
    run.event("checkpoint", 30.5, name="checkpoint_000000", index=0, step=20, bytes=5_000_000, seconds=0.5)
    run.event("checkpoint", 75.5, attempt=1, name="checkpoint_000001", index=1, step=40, bytes=5_000_000, seconds=0.5)
    run.write(
        "checkpoint_000001/.manifest.json", {"name": "checkpoint_000001", "metrics": {"loss": 0.025}, "files": {}}
    )
    traceback = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 88, in step\n    loss.backward()\n'
        '  File "/env/lib/python3.12/site-packages/torch/_tensor.py", line 5, in backward\n    run()\n'
    )
    failed = {"rank": 3, "host": "beta", "summary": "RuntimeError: CUDA out of memory", "traceback": traceback}
    last = {"last_lines": ["\x1b[31mred\x1b[0m </script><b>bold</b>"], "role": "culprit"}
    where = {"where": ["rank 0 in wait at train.py:90"]}
    run.write(
        "error.json", {"type": "WorkerGroupError", "message": "rank 3 ...", "failures": [{**failed, **last}]} | where
    )
    return run

"""The status and the lines of a run of another process, from made files."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from distrain.cli.attaching import Attached, show_until_end
from distrain.console.run_console import RunConsole
from distrain.decisions.run_status import RunStatus
from distrain.storage.runs.listing import local_run
from tests.unit.storage.made import make_run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

HOSTS = {"alpha": [0, 2], "beta": [1]}


def make_attempts(folder: Path, **fields: object) -> None:
    """Make a run of three ranks that began 50 s ago, with one restart; the attempt 1 trains since 20 s."""
    now = time.time()
    attempts = [
        {"attempt": 0, "started": now - 50, "training": now - 45, "ended": now - 30, "hosts": HOSTS},
        {"attempt": 1, "started": now - 25, "training": now - 20, "ended": None, "hosts": HOSTS},
    ]
    run = make_run(folder, "run", started=now - 50, attempts=attempts, **fields)
    lines = [
        {"time": now - 32, "attempt": 0, "rank": 0, "index": 9, "metrics": {"loss": 9.0}},
        {"time": now - 12, "attempt": 1, "rank": 0, "index": 1, "metrics": {"loss": 2.0}, "progress": [1, 10]},
        {"time": now - 2, "attempt": 1, "rank": 0, "index": 11, "metrics": {"loss": 1.0}, "progress": [6, 10]},
        {"time": now - 1, "attempt": 1, "rank": 2, "index": 11, "metrics": {"loss": 1.5}},
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"torn')
    event = {"time": now - 5, "event": "checkpoint", "attempt": 1, "name": "checkpoint_000003"}
    (run / "events.jsonl").write_text(f"{json.dumps(event)}\n")
    logs = run / "logs" / "attempt_1"
    logs.mkdir(parents=True)
    for rank in range(3):
        (logs / f"rank_{rank}.log").write_text(f"one\ntwo\nthree\nat 5%\rof {rank}")


def shown(folder: Path, last: int) -> RunStatus:
    run = local_run(str(folder / "run"))
    status = RunStatus(run.path, started=0.0)
    attached = Attached(run, status, last)
    show_until_end(attached, RunConsole(status, shows_progress=False))
    attached.close()
    return status


def test_the_files_tell_how_far_the_run_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_attempts(tmp_path)
    status, now = shown(tmp_path, 3), time.monotonic()
    assert (status.phase, status.restarts, status.hosts) == ("finished", 1, 2)
    assert (status.progress, status.metrics, round(status.rate() or 0, 2)) == ([6, 10], {"loss": 1.0}, 0.5)
    assert [rank.reports for rank in status.ranks] == [11, 0, 11]
    assert status.checkpoint == "checkpoint_000003"
    ages = [now - status.started, now - (status.ranks[1].begun or 0), now - status.checkpoint_at]
    assert [round(age) for age in ages] == [50, 20, 5]
    assert capfd.readouterr().out.count("three") == 3


def test_it_begins_with_the_last_lines_of_the_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_attempts(tmp_path)
    shown(tmp_path, 3)
    assert capfd.readouterr().out.splitlines() == [
        f"[rank {rank}] {line}" for rank in range(3) for line in ("three", f"of {rank}")
    ]

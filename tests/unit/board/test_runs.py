"""The rows of the board, from files that grow."""

from __future__ import annotations

import fcntl
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from distrain.board import runs
from distrain.board.runs import Board
from tests.unit.page.conftest import STARTED, Run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMES = {"started": 0.0, "training": 1.0, "ended": None}


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at every question."""
    monkeypatch.setattr(runs, "_LOOK_S", 0.0)


def make(storage: Path, name: str = "my-run", status: str = "finished", **fields: Any) -> Run:
    run = Run(storage / name)
    run.root.mkdir()
    run.manifest(TIMES, status=status, **fields)
    return run


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Run]:
    """A run that is running, as its lock is held."""
    run = make(tmp_path, status="running")
    with (run.root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield run


def changed(board: Board, since: int = 0, *metrics: str) -> dict[str, dict[str, Any]]:
    """Return the rows that have changed, after everything was read, by name."""
    board.look()
    while board.read(1.0):
        pass
    return {row["name"]: row for row in board.data(since, metrics or ["loss"])["rows"]}


def row_of(board: Board) -> dict[str, Any]:
    (row,) = changed(board).values()
    return row


def report(run: Run, index: int, loss: float, **fields: Any) -> None:
    run.report(2.0 * index, index, metrics={"loss": loss, "note": "x"}, **fields)


def test_a_row_has_the_progress_the_rate_and_the_last_and_extreme_values(tmp_path: Path) -> None:
    run = make(tmp_path, train_loop_config={"lr": 0.1})
    for index, loss in enumerate([3.0, 1.0, 2.0], start=1):
        for rank in (0, 1):
            report(run, index, loss + rank, rank=rank, progress=[10 * index, 100])
    row = row_of(Board(tmp_path))
    assert (row["state"], row["ranks"], row["hosts"], row["step"]) == ("finished", 4, ["alpha", "beta"], 3)
    assert (row["progress"], row["rate"]) == ([30, 100], 5.0)
    assert (row["metrics"], row["settings"]) == ({"loss": 2.0, "note": "x"}, {"lr": 0.1})
    curve = row["curves"]["loss"]
    assert (curve["x"], curve["y"]) == ([1, 2, 3], [3.0, 1.0, 2.0])
    assert (curve["low"], curve["high"]) == ((2, 1.0), (1, 3.0))


def test_only_what_was_added_is_read_and_only_changed_rows_are_sent(tmp_path: Path, live: Run) -> None:
    make(tmp_path, "other")
    board = Board(tmp_path)
    report(live, 1, 3.0)
    assert changed(board).keys() == {"my-run", "other"}
    file = live.root / "metrics.jsonl"
    file.write_bytes(b"#" * (file.stat().st_size - 1) + b"\n")  # who read it again would lose the first report
    assert changed(board, board.version) == {}
    report(live, 2, 2.0)
    assert changed(board, board.version).keys() == {"my-run"}
    assert changed(board)["my-run"]["curves"]["loss"]["y"] == [3.0, 2.0]


def test_a_restart_replaces_the_reports_that_it_repeats(live: Run) -> None:
    board = Board(live.root.parent)
    for index in range(1, 11):
        report(live, index, index)
    assert row_of(board)["curves"]["loss"]["high"] == (10, 10)
    live.manifest(TIMES, {**TIMES, "started": 30.0, "first_step": 4}, status="running")
    report(live, 1, 0.5, attempt=1)
    curve = row_of(board)["curves"]["loss"]
    assert (curve["x"], curve["y"]) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 0.5])


def test_a_long_file_is_read_a_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_CHUNK", 1000)
    run = make(tmp_path)
    for index in range(1, 401):
        report(run, index, index)
    make(tmp_path, "short").report(1, 1, metrics={"loss": 7})
    board = Board(tmp_path)
    board.look()
    assert board.read(0.0)
    rows = {row["name"]: row for row in board.data(0, ["loss"])["rows"]}
    assert rows["my-run"]["metrics"]["loss"] == 400  # known from the end of the file
    assert rows["my-run"]["unread"] > 20_000
    curve = changed(board)["my-run"]["curves"]["loss"]
    assert (curve["low"], curve["high"]) == ((1, 1), (400, 400))
    assert len(curve["x"]) <= runs.SPARKLINE
    [row] = board.data(board.version, ["loss"], ["my-run"])["rows"]
    assert len(row["curves"]["loss"]["x"]) == 400


def test_a_hang_and_a_trouble_are_notes_until_they_are_over(live: Run) -> None:
    board = Board(live.root.parent)
    live.event("hang_began", 1, text="rank 1 waits", since=STARTED)
    live.event("trouble", 2, host="beta", rank=3, kind="memory", problem="full", text="97% is used")
    assert row_of(board)["note"] == "rank 1 waits; rank 3 on beta: 97% is used"
    live.event("hang", 3, text="rank 1 waits", since=STARTED)
    live.event("trouble_over", 4, host="beta", rank=3, kind="memory", problem="full")
    assert row_of(board)["note"] == ""


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.manifest({**TIMES, "failure": "rank 3 on beta: ValueError"}, status="failed")
    report(run, 1, 3.0)
    run.event("hang", 9, text="rank 1 waits", since=STARTED + 5)
    assert row_of(Board(tmp_path))["note"] == "rank 3 on beta: ValueError; rank 1 waits"


def test_runs_come_and_go_and_another_of_the_same_name_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()  # not a run
    board = Board(tmp_path)
    assert changed(board) == {}
    run = make(tmp_path)
    report(run, 1, 3.0)
    make(tmp_path, "other")
    assert changed(board, board.version).keys() == {"my-run", "other"}
    shutil.rmtree(tmp_path / "other")
    board.look()
    assert board.data(board.version, "loss")["runs"] == ["my-run"]
    shutil.rmtree(run.root)
    report(make(tmp_path, run_id="another"), 1, 1.0)
    assert row_of(board)["curves"]["loss"]["y"] == [1.0]


@pytest.mark.parametrize(
    "line",
    [
        '{"rank":0,"metrics":{"loss":1}}',
        '{"rank":0,"metrics":{"loss":1},"attempt":0,"index":1,"time":NaN}',
        '{"rank":0,"metrics":{"loss":1},"attempt":0,"index":1e400,"time":1}',
        '{"rank":0,"metrics":{"loss":"NaN"},"attempt":0,"index":1,"time":"x"}',
        '{"rank":0,"metrics":{"loss":null},"nonfinite":{"/loss":"nan"},"attempt":0,"index":1,"time":1,"progress":[1,0]}',
    ],
)
@pytest.mark.filterwarnings("ignore:skipped")
def test_damage_and_odd_values_cost_nothing_else(tmp_path: Path, line: str) -> None:
    run = make(tmp_path)
    (run.root / "metrics.jsonl").write_text(f"\n[]\n{line}\n")
    board = Board(tmp_path)
    json.dumps(row_of(board), allow_nan=False)
    report(run, 2, 5.0)
    row = row_of(Board(tmp_path))
    assert row["metrics"]["loss"] == 5.0
    json.dumps(row, allow_nan=False)

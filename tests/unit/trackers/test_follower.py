"""A tracker that follows a run directory: what it is told, what is kept, and what happens after a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from distrain.coordinator.store.local_store import LocalStore
from distrain.errors import StorageError
from distrain.trackers import Report, TrackedRun, Tracker, export
from distrain.trackers.follower import Follower

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrain.storage.checkpoint import Checkpoint
    from tests.unit.trackers.conftest import RunDirectory


class Recorder(Tracker):
    """A service that has what was flushed, and a tracker that logs to it."""

    service: ClassVar[list[tuple[int, int]]] = []
    starts: ClassVar[list[TrackedRun]] = []
    told: ClassVar[list[object]] = []

    def __init__(self, *, ranks: Any = 0, checkpoints: bool = False, fails_at: int = 0) -> None:
        self.ranks = ranks
        self.checkpoints = checkpoints
        self.fails_at = fails_at
        self.pending: list[tuple[int, int]] = []

    def start(self, run: TrackedRun) -> None:
        run.state["starts"] = run.state.get("starts", 0) + 1
        self.starts.append(run)

    def log(self, report: Report) -> None:
        if report.step == self.fails_at:
            raise ConnectionError("no network")
        self.pending.append((report.rank, report.step))

    def checkpoint(self, checkpoint: Checkpoint, step: int) -> None:
        self.told.append((Path(str(checkpoint.path)).name, step))

    def flush(self) -> None:
        self.service.extend(self.pending)
        self.pending.clear()

    def finish(self, status: str) -> None:
        self.told.append(status)


@pytest.fixture(autouse=True)
def _new_service() -> Iterator[None]:
    for kept in (Recorder.service, Recorder.starts, Recorder.told):
        kept.clear()  # type: ignore[attr-defined]
    return


def follow(run: RunDirectory, tracker: Tracker | None = None, *, is_over: bool = False) -> Follower:
    follower = Follower(tracker or Recorder(), run.paths, str(run.paths.root))
    follower.start()
    while follower.advance(is_over=is_over):
        pass
    return follower


def test_a_tracker_is_told_of_the_run(run: RunDirectory) -> None:
    follow(run)
    [told] = Recorder.starts
    assert (told.name, told.directory, told.location) == ("run", run.paths.root, str(run.paths.root))
    assert told.config == {"lr": 0.1, "scaling": {"num_workers": 2}}
    assert told.tags == {"distrain": "0.1", "run_directory": str(run.paths.root)}


def test_new_reports_are_logged_as_they_come(run: RunDirectory) -> None:
    follower = follow(run)
    run.report(1, loss=1.0)
    run.report(2, loss=1.0, end="")  # not written to its end
    assert follower.advance(is_over=False)
    assert Recorder.service == [(0, 1)]
    assert not follower.advance(is_over=False)
    with run.paths.metrics.open("a") as file:
        file.write("\n")
    assert follower.advance(is_over=False)
    assert Recorder.service == [(0, 1), (0, 2)]


@pytest.mark.parametrize(("ranks", "expected"), [(0, [(0, 1)]), ("all", [(0, 1), (1, 1), (10, 1)])])
def test_rank_0_alone_or_all_ranks(run: RunDirectory, ranks: Any, expected: list[tuple[int, int]]) -> None:
    for rank in (0, 1, 10):
        run.report(1, rank=rank, loss=1.0)
    follow(run, Recorder(ranks=ranks))
    assert Recorder.service == expected


def test_reports_wait_until_the_first_step_of_their_attempt_is_known(run: RunDirectory) -> None:
    run.report(1, loss=1.0)
    run.attempts(0, None)
    run.report(1, attempt=1, loss=1.0)
    run.report(2, attempt=1, loss=1.0)
    follower = follow(run)
    assert Recorder.service == [(0, 1)]
    run.attempts(0, 4)
    assert follower.advance(is_over=False)
    assert Recorder.service == [(0, 1), (0, 5), (0, 6)]


def test_the_tracker_goes_on_after_a_crash_in_the_same_tracked_run(run: RunDirectory) -> None:
    run.report(1, loss=1.0)
    follow(run)
    run.report(2, loss=1.0)
    run.report(3, loss=1.0)
    with pytest.raises(ConnectionError):
        follow(run, Recorder(fails_at=3))
    follow(run)
    assert Recorder.service == [(0, 1), (0, 2), (0, 3)]
    assert len({start.id for start in Recorder.starts}) == 1
    assert Recorder.starts[-1].state["starts"] == 3


def test_metrics_that_are_an_older_copy_are_read_from_their_start(run: RunDirectory) -> None:
    """The spool of a remote run, on another machine."""
    for index in (1, 2, 3):
        run.report(index, loss=1.0)
    follow(run)
    run.paths.metrics.unlink()
    for index in (1, 2):
        run.report(index, loss=1.0)
    follower = follow(run)
    for index in (3, 4):
        run.report(index, loss=1.0)
    follower.advance(is_over=False)
    assert Recorder.service == [(0, step) for step in (1, 2, 3, 4)]


def test_a_damaged_line_is_passed_over(run: RunDirectory) -> None:
    run.report(1, loss=1.0)
    with run.paths.metrics.open("ab") as file:
        file.write(b'\0\0\n{"rank":0,"attempt":0}\n[1,"rank":0,]\n')
    run.report(2, loss=1.0)
    with pytest.warns(UserWarning, match="passed over"):
        follow(run)
    assert Recorder.service == [(0, 1), (0, 2)]


def test_many_lines_are_logged_in_parts_and_the_progress_is_saved_after_each(run: RunDirectory) -> None:
    count = 20_000
    text = '{{"time":1.0,"attempt":0,"rank":{rank},"index":{index},"metrics":{{"loss":0.5}}}}\n'
    lines = (text.format(rank=n % 2, index=n // 2 + 1) for n in range(count))
    run.paths.metrics.write_text("".join(lines))
    follower = Follower(Recorder(), run.paths, str(run.paths.root))
    follower.start()
    parts = 0
    while follower.advance(is_over=False):
        parts += 1
        marks = json.loads(run.paths.tracker_state("recorder").read_text())["marks"]
        assert marks["0"][0] == len(Recorder.service)
    assert parts > 1
    assert Recorder.service == [(0, step) for step in range(1, count // 2 + 1)]


def test_checkpoints_are_told_if_they_still_exist(run: RunDirectory) -> None:
    for number, step in enumerate((10, 20, 30)):
        run.commit(f"checkpoint_00000{number}", step)
    (run.paths.root / "checkpoint_000001").rmdir()
    follower = follow(run, Recorder(checkpoints=True))
    follow(run, Recorder(checkpoints=True))
    follower.finish("finished")
    assert Recorder.told == [("checkpoint_000000", 10), ("checkpoint_000002", 30), "finished"]


# -- export ----------------------------------------------------------------------------------------------------------


def test_an_export_logs_what_is_missing_and_only_on_request_all_of_it_again(run: RunDirectory) -> None:
    run.report(1, loss=1.0)
    follow(run)
    run.report(2, loss=1.0)
    run.attempts(0, status="failed")
    export(run.paths.root, Recorder())
    assert (Recorder.service, Recorder.told) == ([(0, 1), (0, 2)], ["failed"])
    export(run.paths.root, Recorder(), again=True)
    assert Recorder.service == [(0, 1), (0, 2)] * 2
    assert len({start.id for start in Recorder.starts}) == 2


def test_an_export_of_a_run_that_was_killed_logs_its_last_reports(run: RunDirectory) -> None:
    run.report(1, loss=1.0)
    run.attempts(None)
    export(run.paths.root, Recorder())
    assert (Recorder.service, Recorder.told) == ([(0, 1)], ["failed"])


def test_an_export_of_no_run_and_of_one_that_trains_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not a run directory"):
        export(tmp_path, Recorder())
    store = LocalStore(run.paths.root)
    with pytest.raises(StorageError, match="has not ended"):
        export(run.paths.root, Recorder())
    store.close()

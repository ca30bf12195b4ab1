"""A tracker at work on a run: what it is told, what is kept, and what happens after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distrain.api.observer import AttemptBegan, Ended, Reported, RunBegan
from distrain.decisions.run_status import RunStatus
from distrain.storage.checkpoint import Checkpoint
from distrain.trackers import Report, TrackedRun, Tracker
from distrain.trackers.logging import TrackerLog
from distrain.trackers.observer import TrackerObserver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.trackers.conftest import RunDirectory


class Recorder(Tracker):
    """A service that has what was flushed, and a tracker that logs to it."""

    checkpoints = True
    service: ClassVar[list[int]] = []
    starts: ClassVar[list[TrackedRun]] = []
    told: ClassVar[list[object]] = []

    def __init__(self, *, fails_at: int = 0) -> None:
        self.fails_at = fails_at

    def start(self, run: TrackedRun) -> None:
        self.pending: list[Report] = []
        run.state["starts"] = run.state.get("starts", 0) + 1
        self.starts.append(run)

    def log(self, report: Report) -> None:
        if report.step == self.fails_at:
            raise ConnectionError("no network")
        self.pending.append(report)

    def checkpoint(self, checkpoint: Checkpoint, step: int) -> None:
        self.told.append((Path(str(checkpoint.path)).name, step))

    def flush(self) -> None:
        self.service.extend(report.step for report in self.pending)
        self.pending.clear()

    def finish(self, status: str) -> None:
        self.told.append(status)


@pytest.fixture(autouse=True)
def _new_service() -> Iterator[None]:
    for kept in (Recorder.service, Recorder.starts, Recorder.told):
        kept.clear()  # type: ignore[attr-defined]
    return


def start(run: RunDirectory, tracker: Tracker | None = None) -> TrackerLog:
    log = TrackerLog(tracker or Recorder(), run.paths.root, str(run.paths.root))
    log.start()
    return log


def report(log: TrackerLog, number: int, progress: Any = None, **metrics: Any) -> None:
    known = {"metrics": metrics or {"loss": 0.5}, "progress": progress, "time": 1.0, "attempt": 0}
    log.report({"step": number, **known})


def test_a_tracker_is_told_of_the_run(run: RunDirectory) -> None:
    start(run)
    [told] = Recorder.starts
    assert (told.name, told.directory, told.location) == ("run", run.paths.root, str(run.paths.root))
    assert told.config == {"lr": 0.1, "scaling": {"num_workers": 2}}
    assert told.tags == {"distrain": "0.1", "run_directory": str(run.paths.root)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), min_size=1, max_size=6))
def test_whatever_the_restarts_every_step_comes_once_and_in_order(
    run: RunDirectory, attempts: list[tuple[int, int]]
) -> None:
    """Each attempt starts at some step that the run has reached, and makes some reports."""
    Recorder.service.clear()
    (run.paths.root / "trackers" / "recorder.json").unlink(missing_ok=True)
    reached, log = 0, start(run)
    for back, count in attempts:
        first = max(0, reached - back)
        for number in range(first + 1, first + count + 1):
            report(log, number)
        reached = max(reached, first + count)
    log.finish("finished")
    assert Recorder.service == list(range(1, reached + 1))


@pytest.mark.parametrize(
    ("progress", "steps"),
    [
        ([[100, 500], [200.0, 500], [200.5, 500]], [100, 200, 201]),
        ([[1, 2], [2, 2], [1, 2], [2, 2]], [1, 2, 3, 4]),  # it begins again with each epoch
        ([[5, 9], [5, 9]], [5, 5]),
    ],
)
def test_progress_is_the_step_if_it_is_a_whole_number_that_does_not_decrease(
    run: RunDirectory, progress: list[Any], steps: list[int]
) -> None:
    log = start(run)
    for number, one in enumerate(progress, start=1):
        report(log, number, one)
    log.flush()
    assert Recorder.service == steps


def test_after_a_crash_the_tracker_continues_and_gets_what_it_has_missed(run: RunDirectory) -> None:
    log = start(run)
    report(log, 1)
    log.flush()
    report(log, 2)  # not flushed
    for index in (1, 2, 3):
        run.report(index, loss=1.0)
    with pytest.raises(ConnectionError):
        start(run, Recorder(fails_at=3))
    start(run)
    assert Recorder.service == [1, 2, 3]
    assert len({start.id for start in Recorder.starts}) == 1
    assert Recorder.starts[-1].state["starts"] == 3


def test_checkpoints_are_told_if_they_still_exist(run: RunDirectory) -> None:
    log = start(run)
    for step in (10, 20):
        log.checkpoint(Checkpoint(run.paths.root / f"checkpoint_{step}"), step)
        (run.paths.root / "checkpoint_20").mkdir(exist_ok=True)
    assert Recorder.told == [("checkpoint_20", 20)]


def test_reports_that_were_left_out_come_from_the_files(run: RunDirectory) -> None:
    """A tracker that is too slow does not hear all reports of a run."""
    log = start(run)
    report(log, 1)
    for index in range(1, 6):
        run.report(index, loss=0.5)
    report(log, 4)
    report(log, 5)
    assert Recorder.service == []
    log.flush()
    assert Recorder.service == [1, 2, 3, 4, 5]


def test_the_last_reports_that_were_left_out_come_from_the_files_at_the_end(run: RunDirectory) -> None:
    root = run.paths.root
    status = RunStatus(str(root), started=0.0)
    began = RunBegan("id", "run", str(root), root, in_process=False)
    slow = TrackerObserver(Recorder(), began, status)
    begun = AttemptBegan(0, ["here"], 1.0)
    first, last = (Reported(0, n, n, {"loss": 0.5}, None, 1.0) for n in (1, 2))
    for fact in (begun, first, last):
        status.hear(fact)
    for index in (1, 2):
        run.report(index, loss=0.5)
    for fact in (began, begun, first):
        slow.hear(fact)
    slow.hear(Ended("finished", "finished", 1.0, None, None, [], None, storage_works=True))
    assert (Recorder.service, Recorder.told) == ([1, 2], ["finished"])

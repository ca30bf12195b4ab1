"""Callbacks of the user's process, with real workers."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distrain
from distrain import Checkpoint, CheckpointConfig, FailureConfig, Result, UserCallback
from tests.process.conftest import files_of

if TYPE_CHECKING:
    from distrain.api.config import RunContext
    from tests.process.conftest import Fit


class Recorder(UserCallback):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.reports: list[list[dict[str, Any] | None]] = []
        self.checkpoints: list[str | None] = []
        self.commits: list[tuple[str, dict[str, Any]]] = []
        self.exceptions: list[dict[int, BaseException]] = []
        self.story: list[str] = []
        self.threads: set[str] = set()
        self.ends: list[tuple[Result, BaseException | None]] = []

    def before_run(self, run_context: RunContext) -> None:
        self.story.append("begin")

    def after_run(self, run_context: RunContext, result: Result, error: BaseException | None) -> None:
        self.ends.append((result, error))
        self.story.append("end")

    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any] | None], checkpoint: Checkpoint | None
    ) -> None:
        self.reports.append(metrics)
        self.checkpoints.append(None if checkpoint is None else Path(checkpoint.path).name)
        self.story.append("report")
        self.threads.add(threading.current_thread().name)

    def after_checkpoint(self, run_context: RunContext, checkpoint: Checkpoint, metrics: dict[str, Any]) -> None:
        assert (Path(checkpoint.path) / ".manifest.json").exists()  # it is committed
        self.commits.append((Path(checkpoint.path).name, metrics))

    def after_exception(self, run_context: RunContext, worker_exceptions: dict[int, BaseException]) -> None:
        self.exceptions.append(worker_exceptions)
        self.story.append("exception")


def rank() -> int:
    return distrain.get_context().get_world_rank()


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def test_a_row_has_the_checkpoint_that_was_committed_with_it(fit: Fit, tmp_path: Path) -> None:
    def train() -> None:
        for step in range(3):
            folder = place / f"model-{rank()}-{step}"
            folder.mkdir()
            (folder / f"rank-{rank()}.txt").write_text(str(step))
            with_checkpoint = step != 1 and rank() == 0
            distrain.report({"step": step}, checkpoint=Checkpoint(folder) if with_checkpoint else None)

    place = tmp_path
    recorder = Recorder()
    result = fit(train, callbacks=[recorder], checkpoint_config=CheckpointConfig(missing_rank_s=0.0))
    assert recorder.checkpoints == ["checkpoint_000000", None, "checkpoint_000001"]
    assert recorder.commits == [("checkpoint_000000", {"step": 0}), ("checkpoint_000001", {"step": 2})]
    assert recorder.threads == {"distrain-callbacks"}
    assert [row[0] for row in recorder.reports] == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert set(files_of(result.checkpoint)) == {"rank-0.txt"}


def test_after_a_failure_the_exceptions_are_handed_over_and_then_it_goes_on(any_fit: Fit) -> None:
    def train() -> int:
        distrain.report({"attempt": attempt()})
        distrain.collective.barrier()
        if attempt() == 0 and rank() == 1:
            raise ValueError("boom")
        if attempt() == 1 and rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        distrain.collective.barrier()
        return attempt()

    recorder = Recorder()
    result = any_fit(train, callbacks=[recorder], failure_config=FailureConfig(max_failures=2))
    assert result.return_value == 2
    assert recorder.story == ["begin", "report", "exception", "report", "exception", "report", "end"]
    [(ended, error)] = recorder.ends
    assert ended is result
    assert error is None
    first, second = recorder.exceptions
    assert list(first) == [1]
    assert isinstance(first[1], ValueError)
    assert list(second) == [0]
    assert "killed by SIGKILL" in str(second[0])
    assert recorder.reports == [[{"attempt": number}] * 2 for number in range(3)]

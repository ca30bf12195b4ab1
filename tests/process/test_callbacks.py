"""Callbacks of the user's process, with real workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import Checkpoint, CheckpointConfig, FailureConfig, Result, UserCallback, WorkerGroupError
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
        self.contexts: list[RunContext] = []
        self.story: list[str] = []
        self.threads: set[threading.Thread] = set()
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
        if checkpoint is not None:
            assert (Path(checkpoint.path) / ".manifest.json").exists()  # it is committed
        self.story.append("report")
        self._called(run_context)

    def after_checkpoint(self, run_context: RunContext, checkpoint: Checkpoint, metrics: dict[str, Any]) -> None:
        assert (Path(checkpoint.path) / ".manifest.json").exists()
        self.commits.append((Path(checkpoint.path).name, metrics))
        self._called(run_context)

    def after_exception(self, run_context: RunContext, worker_exceptions: dict[int, BaseException]) -> None:
        self.exceptions.append(worker_exceptions)
        self.story.append("exception")
        self._called(run_context)

    def _called(self, run_context: RunContext) -> None:
        self.contexts.append(run_context)
        self.threads.add(threading.current_thread())


def rank() -> int:
    return distrain.get_context().get_world_rank()


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


@pytest.mark.parametrize("ranks", ["all ranks", "rank 0"])
def test_a_row_has_the_checkpoint_that_was_committed_with_it(fit: Fit, tmp_path: Path, ranks: str) -> None:
    def train() -> None:
        for step in range(3):
            folder = place / f"model-{rank()}-{step}"
            folder.mkdir()
            (folder / f"rank-{rank()}.txt").write_text(str(step))
            with_checkpoint = step != 1 and (rank() == 0 or ranks == "all ranks")
            distrain.report({"step": step}, checkpoint=Checkpoint(folder) if with_checkpoint else None)

    place = tmp_path
    recorder = Recorder()
    config = CheckpointConfig(missing_rank_s=60.0 if ranks == "all ranks" else 0.0)
    result = fit(train, callbacks=[recorder], checkpoint_config=config)
    assert recorder.checkpoints == ["checkpoint_000000", None, "checkpoint_000001"]
    assert recorder.commits == [("checkpoint_000000", {"step": 0}), ("checkpoint_000001", {"step": 2})]
    assert [thread.name for thread in recorder.threads] == ["distrain-callbacks"]
    assert [row[0] for row in recorder.reports] == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert set(files_of(result.checkpoint)) == (
        {"rank-0.txt", "rank-1.txt"} if ranks == "all ranks" else {"rank-0.txt"}
    )


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


def test_what_was_reported_before_a_failure_is_handed_over_before_it(fit: Fit) -> None:
    """RowAssembly that the others did not complete, too."""

    def train() -> None:
        if rank() == 1:
            distrain.report({"step": 0})
            distrain.collective.barrier()
            raise ValueError("boom")
        for step in range(3):
            distrain.report({"step": step})
        distrain.collective.barrier()
        time.sleep(1000)

    recorder = Recorder()
    with pytest.raises(WorkerGroupError) as raised:
        fit(train, callbacks=[recorder])
    assert recorder.story == ["begin", *["report"] * 3, "exception", "end"]
    assert recorder.ends == [(raised.value.result, raised.value)]
    assert [[metrics and metrics["step"] for metrics in row] for row in recorder.reports] == [
        [0, 0],
        [1, None],
        [2, None],
    ]
    assert [sorted(exceptions) for exceptions in recorder.exceptions] == [[1]]

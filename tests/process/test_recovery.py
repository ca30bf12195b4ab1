"""Restarts: which failures have one, from which checkpoint, and what is kept of earlier attempts."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig, WorkerGroupError
from distrain.api.backend import BackendConfig
from distrain.coordinator.run.fit import run_work
from distrain.worker.job.job import ScriptWork
from tests.process.conftest import files_of, log_of, records

if TYPE_CHECKING:
    from tests.process.conftest import Fit

SAME_FAILURE = (
    "no restart: the same rank has failed twice in the same way at the same place, which is probably a bug "
    "(FailureConfig(retry_same_failure=True) restarts anyway)"
)


def rank() -> int:
    return distrain.get_context().get_world_rank()


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def wait_for_the_end() -> None:
    time.sleep(1000)


def failure(fit: Fit, function: Any, *args: Any, **options: Any) -> WorkerGroupError:
    with pytest.raises(WorkerGroupError) as raised:
        fit(function, *args, **options)
    return raised.value


# -- whether there is another attempt --------------------------------------------------------------------------------


def test_the_same_exception_twice_ends_the_run(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        distrain.report({"attempt": attempt()})
        if rank() == 1:
            raise ValueError("a bug")
        wait_for_the_end()

    error = failure(fit, train, failure_config=FailureConfig(max_failures=5, backoff_s=0.1))
    assert "the next attempt starts in 0.1 s" in capsys.readouterr().err
    assert SAME_FAILURE in str(error).splitlines()
    assert error.result is not None
    assert {record["attempt"] for record in records(error.result.path)} == {0, 1}
    assert (error.culprit, type(error.worker_failures[1])) == (1, ValueError)


class BrokenBackend(BackendConfig):
    def setup(self, context: Any) -> None:
        raise RuntimeError("no such interface")


def test_there_is_no_restart_when_no_rank_ever_got_into_train_func(fit: Fit) -> None:
    broken = replace(fit, backend=BrokenBackend())
    error = failure(broken, lambda: None, failure_config=FailureConfig(max_failures=-1))
    assert "no restart: no rank has ever entered train_func" in str(error).splitlines()
    assert "RuntimeError: no such interface" in str(error)


# -- what the others may do when one fails ---------------------------------------------------------------------------

SCRIPT_WITH_HANDLER = """
import os, pathlib, signal, sys, time
rank, place = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])

def save(number, frame):
    (place / "saved.new").touch()
    time.sleep(0.3)
    (place / "saved.new").rename(place / "saved")
    sys.exit(1)  # which is not what the run has failed of

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rank == 1:
        signal.signal(signal.SIGTERM, save)
    (place / f"ready-{rank}").touch()
    while rank > 0 or not all((place / f"ready-{other}").exists() for other in (1, 2)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
assert (place / "saved").exists()
"""
LONG_S = 600.0
"""Seconds that no test waits for."""


def test_the_other_ranks_of_a_script_can_save_when_one_fails(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 handles SIGTERM. Rank 2 does not, so nobody waits for it."""
    (tmp_path / "train.py").write_text(SCRIPT_WITH_HANDLER)
    began = time.monotonic()
    result = run_work(
        ScriptWork(path=str(tmp_path / "train.py"), argv=[str(tmp_path)], backend=BackendConfig()),
        ScalingConfig(num_workers=3),
        RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=1, peer_failure_grace_s=LONG_S)),
    )
    assert result.error is None
    assert time.monotonic() - began < LONG_S / 10
    [line] = [line for line in capsys.readouterr().err.splitlines() if "its log" in line]
    assert "rank 0 was killed by SIGKILL" in line


@pytest.mark.parametrize("grace_s", [0.0, LONG_S])
def test_the_other_ranks_of_a_train_func_are_unwound_when_one_fails_if_that_is_wanted(
    fit: Fit, tmp_path: Path, grace_s: float
) -> None:
    def train() -> None:
        (tmp_path / f"ready-{rank()}").touch()
        try:
            while rank() > 0 or not all((tmp_path / f"ready-{other}").exists() for other in (1, 2)):
                time.sleep(0.01)
            raise OSError("the disk of rank 0")
        finally:
            if rank() > 0:
                time.sleep(0.2)
                (tmp_path / f"unwound-{rank()}").touch()

    error = failure(fit, train, workers=3, failure_config=FailureConfig(peer_failure_grace_s=grace_s))
    assert len(list(tmp_path.glob("unwound-*"))) == (2 if grace_s else 0)
    assert (error.culprit, list(error.stopped)) == (0, [1, 2])
    assert len(error.failures) == 1


# -- from where, and what is kept ------------------------------------------------------------------------------------


def train_with_checkpoints(config: dict[str, Any]) -> list[int]:
    """Rank 1 is killed in every attempt, the first step after the checkpoint that it has resumed from."""
    place = Path(config["place"])
    checkpoint = distrain.get_checkpoint()
    first = 0 if checkpoint is None else int(Path(checkpoint.path, "step.txt").read_text()) + 1
    print(f"attempt {attempt()} begins at step {first}")
    for step in range(first, 3):
        folder = place / f"model-{rank()}-{attempt()}-{step}"
        folder.mkdir()
        (folder / ("step.txt" if rank() == 0 else f"rank-{rank()}.txt")).write_text(str(step))
        distrain.report({"step": step, "first": first}, checkpoint=Checkpoint(folder))
        while (latest := distrain.get_checkpoint()) is None or int(Path(latest.path, "step.txt").read_text()) < step:
            time.sleep(0.001)
        distrain.collective.barrier()
        if rank() == 1 and step < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        distrain.collective.barrier()
    return [first, attempt()]


def test_every_attempt_goes_on_at_the_last_checkpoint_and_all_are_joined(
    any_fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = FailureConfig(max_failures=2)
    result = any_fit(train_with_checkpoints, {"place": str(tmp_path)}, failure_config=config)
    assert result.return_value == [2, 2]
    shown = capsys.readouterr().err
    assert "restart 1 of 2, from checkpoint_000000\n" in shown
    assert "restart 2 of 2, from checkpoint_000001\n" in shown
    assert result.metrics == {"step": 2, "first": 2}
    assert files_of(result.checkpoint) == {"step.txt": "2", "rank-1.txt": "2"}
    assert len(result.best_checkpoints) == 3
    for number in (0, 1):
        lines = [(line["attempt"], line["metrics"]["step"]) for line in records(result.path, rank=number)]
        assert lines == [(0, 0), (1, 1), (2, 2)]
        logs = [log_of(result.path, number, attempt) for attempt in range(3)]
        assert logs == [f"attempt {attempt} begins at step {attempt}\n" for attempt in range(3)]
    assert Result.from_path(result.path).metrics == result.metrics

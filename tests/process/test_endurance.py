"""Events that must not end or spoil a run: unlucky moments, broken checkpoints, exceptions in the wrong place."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import distrain
from distrain import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.process.conftest import Fit


def test_an_exception_in_the_middle_of_a_report_does_not_tear_the_stream(fit: Fit) -> None:
    """A user's alarm goes off while the pipe is full, since the agent does not read."""

    class TooLate(Exception):
        pass

    def too_late(number: int, frame: object) -> None:
        raise TooLate

    def train() -> int:
        agent = psutil.Process().parents()[1]
        signal.signal(signal.SIGALRM, too_late)
        agent.suspend()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            while True:
                distrain.report({"text": "x" * 100_000})
        except TooLate:
            pass
        finally:
            agent.resume()
        distrain.report({"after": 1})
        return 7

    result = fit(train, workers=1)
    assert (result.return_value, result.metrics) == (7, {"after": 1})


def test_a_checkpoint_to_resume_from_that_is_not_there_is_an_error_at_once(fit: Fit, tmp_path: Path) -> None:
    with pytest.raises(distrain.CheckpointError, match="missing"):
        fit(lambda: None, resume_from=Checkpoint(tmp_path / "missing"))
    (file := tmp_path / "run.json").touch()
    with pytest.raises(distrain.CheckpointError, match=f"{file} is a file, but a checkpoint is a directory"):
        fit(lambda: None, resume_from=Checkpoint(file))
    with pytest.raises(distrain.CheckpointError, match=f"{tmp_path} is a run; name a checkpoint in it"):
        fit(lambda: None, resume_from=Checkpoint(tmp_path))


def test_a_rank_ended_from_outside_by_sigterm_says_so(fit: Fit) -> None:
    def train() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    with pytest.raises(distrain.WorkerGroupError, match=r"rank 0 .*SIGTERM") as caught:
        fit(train, workers=1)
    assert caught.value.exit_code == 143


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk_ends_the_run_with_what_it_has(fit: Fit, small_disk: Path) -> None:
    def train() -> None:
        for step in range(100_000):
            distrain.report({"step": step, "text": "x" * 1000})

    with pytest.raises(distrain.TrainingFailedError, match=r"cannot write metrics in .*No space left") as caught:
        fit(train, storage_path=small_disk)
    assert caught.value.result.metrics["step"] > 100


def test_children_of_a_worker_end_by_sigterm_as_anywhere_else(fit: Fit) -> None:
    """They get neither our handler nor lose one that train_func has set for them."""

    def wait_for_the_end(ready: Any) -> None:
        ready.send(True)
        while True:
            time.sleep(0.01)  # pause() would miss a signal that comes just before it

    def exit_code_after_sigterm() -> int:
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=wait_for_the_end, args=(there,))
        child.start()
        here.recv()  # CPython drops a signal that comes right after the fork
        child.terminate()
        child.join()
        assert child.exitcode is not None
        return child.exitcode

    def train() -> tuple[int, int]:
        plain = exit_code_after_sigterm()
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9))
        return plain, exit_code_after_sigterm()

    assert fit(train, workers=1).return_value == (-signal.SIGTERM, 9)

"""Runs with checkpoints in memory: ranks and whole runs are killed, and memory is damaged."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import distrain
from distrain import Checkpoint, CheckpointConfig, CheckpointUploadMode, FailureConfig, WorkerGroupError
from distrain.worker.reporting import memory_part
from distrain.worker.reporting.memory_part import MemoryParts
from tests.conftest import wait_until
from tests.process.conftest import Fit, files_of
from tests.tables import SEED

MEMORY = CheckpointUploadMode.MEMORY

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/memory_kills"


SLOW = ("--slow-storage-s=1", "--pause-s=0.4")
"""A storage that is always busy, and steps that leave time for copies."""


@pytest.mark.parametrize(
    ("kind", "kills", "options"),
    [
        ("flip", 2, ()),
        ("all", 1, ()),
        pytest.param("copies", 2, (), marks=pytest.mark.slow),
        pytest.param("all", 2, ("--hosts", *SLOW), marks=pytest.mark.slow),
    ],
)
def test_what_was_saved_comes_back(kind: str, kills: int, options: tuple[str, ...]) -> None:
    command = [sys.executable, SCRIPT, kind, f"--kills={kills}", "--ranks=2", f"--seed={SEED % 1000}", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_error_of_a_gpu_copy_is_told_as_what_it_is(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on in memory after the restart."""

    def train() -> None:
        step = checkpoint.to_dict()["step"] if (checkpoint := distrain.get_checkpoint()) else 0
        for step in range(step + 1, 5):
            if (step, distrain.get_context().attempt) == (3, 0):
                write = MemoryParts.write

                def copy() -> None:
                    raise RuntimeError("CUDA error: unspecified launch failure")

                MemoryParts.write = lambda *args: replace(write(*args), copy_from_gpu=copy)  # type: ignore[method-assign]
            distrain.report({"step": step}, Checkpoint.from_dict({"step": step}), checkpoint_upload_mode=MEMORY)

    result = Fit(storage=storage)(train, failure_config=FailureConfig(max_failures=1))
    error = capsys.readouterr().err
    assert "could not be stored: RuntimeError: CUDA error: unspecified launch failure" in error
    assert "restart 1 of 1, from checkpoint_000001" in error
    assert "from now on, they go to storage" not in error
    assert result.metrics == {"step": 4}


def full(needed: int) -> None:
    raise OSError(errno.ENOSPC, "the memory is full")


@pytest.mark.parametrize(("every", "fails", "short_at"), [(1, False, None), (4, True, None), (1, False, 2)])
def test_a_loop_that_stays_as_it_is_keeps_the_last_and_the_best(
    fit: Fit, tmp_path: Path, every: int, fails: bool, short_at: int | None
) -> None:
    """Also if the memory of a host is short from some step on."""
    scores = [0.1, 0.2, 0.9, 0.5, 0.8, 0.4, 0.3]

    def train(config: dict[str, Any]) -> list[str]:
        rank, seen = distrain.get_context().get_world_rank(), []
        for step, acc in enumerate(scores):
            if rank == 1 and step == short_at:
                memory_part._check_room = full
            folder = Path(tempfile.mkdtemp(dir=config["tmp"]))
            (folder / f"part-{rank}").write_text(f"{step}")
            distrain.report({"acc": acc}, Checkpoint(folder), delete_local_checkpoint_after_upload=True)
            checkpoint = distrain.get_checkpoint()
            assert checkpoint is not None
            with checkpoint.as_directory() as read:
                seen += [Path(read, name).read_text() for name in ("part-0", "part-1")]
        if config["fails"]:
            raise ValueError("after the last step")
        return seen

    kept = CheckpointConfig(memory_every=every, num_to_keep=2, checkpoint_score_attribute="acc")
    local = tmp_path / "local"
    local.mkdir()
    config = {"tmp": str(local), "fails": fails}
    if fails:
        with pytest.raises(WorkerGroupError, match="after the last step") as raised:
            fit(train, config, checkpoint_config=kept)
        result = raised.value.result
    else:
        result = fit(train, config, checkpoint_config=kept)
        assert result.return_value == [f"{step}" for step in range(len(scores)) for _ in range(2)]
        assert not list(local.iterdir())
    assert files_of(result.checkpoint) == {"part-0": "6", "part-1": "6"}
    assert sorted(metrics["acc"] for _, metrics in result.best_checkpoints) == [0.8, 0.9]
    for checkpoint, metrics in result.best_checkpoints:
        step = str(scores.index(metrics["acc"]))
        assert files_of(checkpoint) == {"part-0": step, "part-1": step}


@pytest.mark.parametrize("mode", [MEMORY, CheckpointUploadMode.SYNC])
def test_a_damaged_checkpoint_is_found_when_ranks_cannot_load_it(fit: Fit, mode: CheckpointUploadMode) -> None:
    """The next attempt starts from the one before, in memory or on storage."""

    def train() -> list[int]:
        checkpoint = distrain.get_checkpoint()
        start = checkpoint.to_dict()["step"] if checkpoint else 0
        for step in range(start + 1, 5):
            way = mode if step in (2, 3) else CheckpointUploadMode.SYNC
            distrain.report({"step": step}, Checkpoint.from_dict({"step": step}), checkpoint_upload_mode=way)
        newest = distrain.get_checkpoint()
        assert newest is not None
        if not start:
            [file] = [path for path in Path(newest.path).iterdir() if path.suffix == ".pkl"]
            file.write_bytes(b"damaged")
            raise RuntimeError("now it cannot be loaded")
        return [start, newest.to_dict()["step"]]

    result = fit(train, workers=1, failure_config=FailureConfig(max_failures=3))
    assert result.return_value == [3, 4]


def train(config: dict[str, int]) -> None:
    checkpoint = distrain.get_checkpoint()
    start = checkpoint.to_dict()["step"] if checkpoint else 0
    for step in range(start + 1, config["steps"] + 1):
        saved = Checkpoint.from_dict({"step": step, "weights": os.urandom(80_000_000)})
        distrain.report({"step": step}, checkpoint=saved, checkpoint_upload_mode=CheckpointUploadMode.MEMORY)


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", ["agent", "guard", "uploader"])
def test_a_run_has_finished_when_its_last_checkpoint_is_stored(fit: Fit, victim: str) -> None:
    killed: list[psutil.Process] = []

    def find(*words: str) -> list[psutil.Process]:
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if any(word in " ".join(process.cmdline()) for word in words):
                    found.append(process)
        return found

    def kill() -> None:
        wait_until(lambda: bool(find(" uploader ", "distrain: uploader")), what="an uploader that stores it")
        [uploader] = find(" uploader ", "distrain: uploader")
        uploader.suspend()
        [process] = [uploader] if victim == "uploader" else find(f"distrain: {victim} of")
        process.kill()
        killed.append(process)

    thread = threading.Thread(target=kill)
    thread.start()
    result = fit(train, {"steps": 3}, name="run", workers=1, failure_config=FailureConfig(max_failures=2))
    thread.join()
    assert killed
    assert result.checkpoint is not None
    assert result.checkpoint.to_dict()["step"] == 3

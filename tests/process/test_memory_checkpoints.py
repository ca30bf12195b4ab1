"""Runs with checkpoints in memory: ranks and whole runs are killed, and memory is damaged."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

import distrain
from distrain import Checkpoint, CheckpointUploadMode, FailureConfig
from tests.conftest import wait_until
from tests.tables import SEED

if TYPE_CHECKING:
    from tests.process.conftest import Fit

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/memory_kills"


SLOW = ("--slow-storage-s=1", "--pause-s=0.4")
"""A storage that is always busy, and steps that leave time for copies."""


@pytest.mark.parametrize(
    ("kind", "kills", "options"),
    [
        ("rank", 3, ()),
        ("flip", 1, ()),
        ("all", 1, ()),
        ("copies", 2, ()),
        pytest.param("host", 2, SLOW, marks=pytest.mark.slow),
        pytest.param("all", 2, ("--hosts", *SLOW), marks=pytest.mark.slow),
    ],
)
def test_what_was_saved_comes_back(kind: str, kills: int, options: tuple[str, ...]) -> None:
    command = [sys.executable, SCRIPT, kind, f"--kills={kills}", "--ranks=2", f"--seed={SEED % 1000}", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr


def train(config: dict[str, int]) -> None:
    checkpoint = distrain.get_checkpoint()
    start = checkpoint.to_dict()["step"] if checkpoint else 0
    for step in range(start + 1, config["steps"] + 1):
        saved = Checkpoint.from_dict({"step": step, "weights": os.urandom(80_000_000)})
        distrain.report({"step": step}, checkpoint=saved, checkpoint_upload_mode=CheckpointUploadMode.MEMORY)


@pytest.mark.parametrize("victim", ["agent", "guard", "uploader"])
def test_a_run_has_finished_when_its_last_checkpoint_is_stored(fit: Fit, victim: str) -> None:
    run, killed = fit.storage / "run", []

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
    assert not list(run.glob(".memory-*"))

"""The screen of a script whose fit() fails: that of `distrain run`, and no frame of distrain."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import os, signal, sys
from distrain import DataParallelTrainer, DistrainError, RunConfig, ScalingConfig

def train(config):
    exec(config["train"])

def fit(code="raise ValueError('boom')", workers=0):
    scaling = ScalingConfig(num_workers=workers)
    trainer = DataParallelTrainer(
        train, train_loop_config={"train": code}, scaling_config=scaling, run_config=RunConfig(storage_path="runs")
    )
    trainer.fit()

"""
SCREEN = """\
distrain: training failed ───────────────────────────
rank 0 on localhost: ValueError: boom
  Traceback (most recent call last):
"""


def ran(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT + code)
    return subprocess.run(
        [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_script_shows_the_screen_of_the_command_line(tmp_path: Path, workers: int) -> None:
    done = ran(tmp_path, f"fit(workers={workers})\n")
    assert SCREEN in done.stderr
    assert done.stderr.count("Traceback") == 1  # that of the rank
    assert "trainer.py" not in done.stderr
    assert done.returncode == 1


def test_ctrl_c_shows_no_frames(tmp_path: Path) -> None:
    done = ran(tmp_path, "fit('import signal; signal.raise_signal(signal.SIGINT)')\n")
    assert "distrain: stopped by Ctrl-C" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == -signal.SIGINT  # 130 in a shell


def test_ctrl_c_elsewhere_and_other_errors_look_as_ever(tmp_path: Path) -> None:
    caught = "try:\n    fit()\nexcept DistrainError as error:\n    print('caught', file=sys.stderr)\n"
    done = ran(tmp_path, caught + "    raise RuntimeError('mine') from error\n")
    assert done.stderr.rstrip().endswith("RuntimeError: mine")
    assert "distrain: training failed" not in done.stderr
    done = ran(tmp_path, caught + "os.kill(os.getpid(), signal.SIGINT)\n")
    *_, end = done.stderr.partition("caught\n")
    assert end.startswith("Traceback")
    assert done.returncode == -signal.SIGINT


def test_what_cannot_start_is_a_screen_too(tmp_path: Path) -> None:
    done = ran(tmp_path, "import threading\nlock = threading.Lock()\ntrain.__defaults__ = (lock,)\nfit(workers=1)\n")
    assert "distrain: cannot launch ───" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1

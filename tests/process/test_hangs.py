"""Stacks of ranks that make no progress: shown after a while, at a time limit, on demand, and after a failure."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import distrain
from distrain import FailureConfig, HangError, Result, WorkerGroupError
from distrain.coordinator.requests import STACKS, connect
from distrain.storage.lines import read_events
from distrain.storage.paths import RunPaths
from distrain.system.process import STACKS_SIGNAL
from tests.conftest import wait_until
from tests.process.conftest import ask_run

if TYPE_CHECKING:
    from tests.process.conftest import Fit

WORKERS = 8
IN_C, STOPPED = 3, 5
WAITING = [rank for rank in range(WORKERS) if rank not in (IN_C, STOPPED)]


def hang(config: dict[str, Any]) -> str:
    """In the first attempt rank 3 is in C with the GIL, rank 5 is stopped, and the others wait for them."""
    rank = distrain.get_context().get_world_rank()
    distrain.report({"rank": rank})
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0:
        Path(config["place"], f"pid-{rank}.new").write_text(str(os.getpid()))
        Path(config["place"], f"pid-{rank}.new").rename(Path(config["place"], f"pid-{rank}"))
        if rank == IN_C:
            re.match(r"(a+)+$", "a" * 40 + "b")
        if rank == STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)
    distrain.collective.barrier()
    return "trained"


def assert_places(text: str) -> None:
    """Everybody's, in three lines; ``text`` may say more."""
    assert re.search(r"6 ranks \(0-2, 4, 6, 7\) in barrier at test_hangs\.py:\d+\n", text)
    assert re.search(r"rank 3 in match at test_hangs\.py:\d+\n", text)
    assert "rank 5 did not answer: stopped (SIGSTOP)" in text


def ask(run: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distrain", "stacks", str(run)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0)


# -- by itself -------------------------------------------------------------------------------------------------------


def test_a_hang_is_shown_then_ended_and_retried(fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure_config = FailureConfig(max_failures=1, hang_report_s=1.0, hang_timeout_s=2.0)
    result = fit(hang, {"place": str(tmp_path)}, workers=WORKERS, failure_config=failure_config)
    assert result.return_value == "trained"
    shown = capsys.readouterr().err
    folder = Path(result.path, "evidence", "attempt_0", "stacks")
    assert shown.count("no rank has reported or printed anything for 1 s") == 1
    assert f"stacks are in {folder.parent}" in shown
    assert_places(shown)
    assert "no rank has made progress for 2 s" in shown
    assert "restart 1 of 1" in shown
    kept = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(kept) == {f"rank_{rank}.txt" for rank in range(WORKERS) if rank != STOPPED}
    assert "in match" in kept["rank_3.txt"]
    assert "in hang" in kept["rank_0.txt"]
    first, second = json.loads(Path(result.path, "run.json").read_text())["attempts"]
    assert first["failure"].startswith("no rank has made progress for 2 s")
    assert second["failure"] is None


def test_without_workers_the_place_is_shown_too(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> str:
        time.sleep(1.5)
        distrain.report({})
        return "trained"

    result = fit(train, workers=0, failure_config=FailureConfig(hang_report_s=0.5))
    assert result.return_value == "trained"
    shown = capsys.readouterr().err
    assert "no rank has reported or printed anything for 0.5 s" in shown
    assert "rank 0 in train at test_hangs.py:" in shown
    *_, hang = read_events(RunPaths(Path(result.path)).events)
    assert hang["event"] == "hang"
    assert 1.0 < hang["time"] - hang["since"] < 10


# -- on demand, and after a failure ----------------------------------------------------------------------------------


def test_where_the_ranks_are_is_told_on_demand_and_when_one_dies(fit: Fit, tmp_path: Path) -> None:
    run = fit.storage / "run"
    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(fit, hang, {"place": str(tmp_path)}, workers=WORKERS, name="run")
        pids = [tmp_path / f"pid-{rank}" for rank in range(WORKERS)]
        try:
            wait_until(lambda: training.done() or all(path.exists() for path in pids), what="all ranks train")
            workers = [psutil.Process(int(path.read_text())) for path in pids]
            wait_until(lambda: workers[STOPPED].status() == psutil.STATUS_STOPPED, what="one is stopped")
            answers: list[subprocess.CompletedProcess[str]] = []

            def all_wait() -> bool:
                answers.append(ask(run))
                return "6 ranks" in answers[-1].stdout

            wait_until(all_wait, what="all the others wait")
            answer = answers[-1]
            assert answer.returncode == 0
            assert_places(answer.stdout)
            assert sorted(path.name for path in run.glob("evidence/*")) == ["attempt_0"]
        finally:
            for path in pids[:1]:
                os.kill(int(path.read_text()), signal.SIGKILL)
        with pytest.raises(WorkerGroupError) as raised:
            training.result(timeout=30.0)
    text = str(raised.value)
    assert raised.value.culprit == 0
    stopped = text.partition("ranks 1-7 were stopped by distrain\n")[2]
    assert re.search(r"5 ranks \(1, 2, 4, 6, 7\) in barrier at test_hangs\.py:\d+\n", stopped)
    assert re.search(r"rank 3 in match at test_hangs\.py:\d+\n", stopped)
    assert "    rank 5 did not answer: stopped (SIGSTOP)" in stopped  # once, although it was asked twice


# -- taking stacks does no harm --------------------------------------------------------------------------------------


def test_taking_stacks_does_not_kill_a_rank_whose_threads_begin_and_end(fit: Fit, tmp_path: Path) -> None:
    """Without the GIL, faulthandler follows a list of threads that others change meanwhile."""

    def train(config: dict[str, str]) -> None:
        while not Path(config["end"]).exists():
            threads = [threading.Thread(target=len, args=("",)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    run, end = RunPaths(fit.storage / "run"), tmp_path / "end"
    with ThreadPoolExecutor(1) as executor:
        training = executor.submit(fit, train, {"end": str(end)}, workers=2, name="run")
        try:
            wait_until(lambda: training.done() or "test_hangs.py" in ask(run.root).stdout, what="the ranks train")
            with contextlib.closing(connect(run)) as channel:
                channel.send(b"\xff\x00 ../../etc/passwd \n\n" * 100)  # nonsense is passed over
                assert not channel.wait(10.0)
            for _ in range(100):
                ask_run(run, STACKS)
        finally:
            end.touch()
        assert training.result(timeout=30.0).error is None


SIGNALLER = """
import os, sys, time
for _ in range(2000):
    os.kill(int(sys.argv[1]), int(sys.argv[2]))
    time.sleep(0.002)
"""


def test_the_signal_for_stacks_does_not_kill_a_rank_whose_threads_begin_and_end(fit: Fit) -> None:
    """A rank gets it that does not answer soon: native code holds the GIL, or the machine is busy."""

    def train() -> str:
        words = [sys.executable, "-c", SIGNALLER, str(os.getpid()), str(int(STACKS_SIGNAL))]
        with subprocess.Popen(words) as signaller:
            while signaller.poll() is None:
                threads = [threading.Thread(target=len, args=("",)) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        return "trained" if signaller.returncode == 0 else "the signaller has failed"

    assert fit(train, workers=1).return_value == "trained"


def test_taking_stacks_does_not_kill_workers_that_are_still_starting(fit: Fit) -> None:
    """The interpreter of a spawned worker needs that long to start, and installs its signal handler afterwards."""

    def train() -> None:
        time.sleep(60.0)

    with pytest.raises(HangError) as raised:
        replace(fit, start_method="spawn")(train, failure_config=FailureConfig(hang_timeout_s=0.2))
    error = raised.value
    assert str(error).startswith("no rank has reported or printed anything for 0.2 s")
    assert (error.failures[0].rank, error.failures[0].kind) == (error.culprit, "hang")
    assert error.result is not None
    again = Result.from_path(error.result.path).error
    assert isinstance(again, HangError)
    assert str(again) == str(error)
    with pytest.raises(FileNotFoundError):
        connect(RunPaths(Path(error.result.path)))

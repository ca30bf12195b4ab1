"""``distrain profile``: a trace and samples of a rank of a running run."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain import Result, WorkerGroupError
from distrain.cli import following
from distrain.cli.main import command_of
from distrain.storage.runs.listing import NoSuchRun
from tests.conftest import wait_until
from tests.process.conftest import wait_for_reports

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from tests.process.conftest import Fit


def profile(run: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "distrain", "profile", str(run), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def begin(run: Path, *options: str) -> subprocess.Popen[str]:
    """Return when the profile has begun."""
    command = profile(run, *options)
    assert command.stdout is not None
    line = command.stdout.readline()
    assert "profiling for" in line, line
    return command


def shown_by(command: subprocess.Popen[str]) -> str:
    return command.communicate(timeout=60.0)[0]


def train(config: dict[str, Any]) -> str:
    """Rank 1 uses torch."""

    def slow_tokenizer(text: str) -> int:
        total = 0
        for letter in text:
            total += ord(letter)  # the hot line
        return total

    rank, ends = distrain.get_context().get_world_rank(), Path(config["ends"])
    if rank == 1:
        import torch

        torch.set_num_threads(1)
        weights = torch.ones(50, 50)
    while not ends.exists():
        slow_tokenizer("some text " * 3000)
        if rank == 1:
            weights = (weights @ weights).relu() / 50
        distrain.report({})
    return "trained"


def test_a_profile_names_the_hot_line_and_traces_torch_and_the_training_continues(
    any_fit: Fit, thread: Callable[..., Future[Result]], tmp_path: Path
) -> None:
    run, ends = any_fit.storage / "run", tmp_path / "ends"
    training = thread(any_fit, train, {"ends": str(ends)}, name="run")
    wait_for_reports(run)
    wait_until(lambda: '"rank":1' in (run / "metrics.jsonl").read_text(), what="rank 1 trains")
    commands = [begin(run, "-r", rank, "--seconds", "2") for rank in ("0", "1")]
    shown = [shown_by(command) for command in commands]
    assert [command.returncode for command in commands] == [0, 0], shown
    assert "there is no rank 7; the run has 2 workers, from 0" in shown_by(profile(run, "-r", "7"))
    interrupted = begin(run)
    interrupted.send_signal(signal.SIGINT)
    assert "Traceback" not in shown_by(interrupted)
    assert interrupted.returncode == 130
    ends.touch()
    assert training.result(timeout=60.0).return_value == "trained"

    hot = Path(__file__).read_text().splitlines().index("            total += ord(letter)  # the hot line") + 1
    folder = run / "evidence/attempt_0"
    for rank, text in enumerate(shown):
        title, *first_rows = text.splitlines()[:3]
        assert title == f"rank {rank}: the lines of your code with the most time"
        assert any(re.search(rf"slow_tokenizer \(test_profiles\.py:({hot}|{hot - 1})\)", row) for row in first_rows), (
            text
        )
        file = folder / f"samples/rank_{rank}.collapsedstack.txt"
        assert f"all stacks, for https://www.speedscope.app: {file}" in text
        assert "MainThread;" in file.read_text()
    file = folder / "trace/rank_1.json.gz"
    assert f"torch's operations, for https://ui.perfetto.dev: {file}" in shown[1]
    with gzip.open(file) as trace:
        operations = [one for one in json.load(trace)["traceEvents"] if one.get("cat") == "cpu_op"]
    assert "aten::mm" in {one["name"] for one in operations}
    assert all(one["tid"] == one["pid"] for one in operations)  # those of the main thread
    printed = "".join(log.read_text() for log in (run / "logs/attempt_0").rglob("*") if log.is_file())
    assert ".cpp:" not in printed  # torch's own lines


def test_a_rank_that_keeps_the_gil_is_shown_and_the_end_of_the_run_is_told(
    fit: Fit, thread: Callable[..., Future[Result]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(config: dict[str, Any]) -> None:
        Path(config["pid"]).write_text(str(os.getpid()))
        distrain.report({})
        re.match(r"(a+)+$", "a" * 40 + "b")

    monkeypatch.setattr(following, "_PATIENCE_S", 0.5)
    run = fit.storage / "run"
    training = thread(fit, hang, {"pid": str(tmp_path / "pid")}, name="run", workers=1)
    wait_for_reports(run)
    with pytest.raises(NoSuchRun, match="native code in it keeps Python from running") as raised:
        following.run_profile(command_of("profile")[0].parse_args([str(run), "--seconds", "1"]))
    assert re.search(r"rank 0 in match at test_profiles\.py:\d+", str(raised.value))
    command = begin(run, "--seconds", "60")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert "run is not running: its state is failed" in shown_by(command)
    assert command.returncode == 2
    with pytest.raises(WorkerGroupError):
        training.result(timeout=60.0)
    assert "run is not running: its state is failed" in shown_by(profile(run))

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
    first = begin(run, "-r", "0,1", "--seconds", "2")
    assert "another `distrain profile` of rank 1 is under way" in shown_by(profile(run, "-r", "1"))
    shown = shown_by(first)
    assert first.returncode == 0, shown
    assert "there is no rank 7; the run has 2 workers, from 0" in shown_by(profile(run, "-r", "7"))
    interrupted = begin(run)
    interrupted.send_signal(signal.SIGINT)
    assert "Traceback" not in shown_by(interrupted)
    assert interrupted.returncode == 130
    ends.touch()
    assert training.result(timeout=60.0).return_value == "trained"

    hot = Path(__file__).read_text().splitlines().index("            total += ord(letter)  # the hot line") + 1
    tables = shown.split("the lines of your code with the most time")[1:]
    assert len(tables) == 2
    for table in tables:
        first_rows = table.splitlines()[2:4]
        assert any(re.search(rf"slow_tokenizer \(test_profiles\.py:({hot}|{hot - 1})\)", row) for row in first_rows), (
            shown
        )
    folder = run / "evidence/attempt_0/profile"
    assert "aten::mm" in shown
    check_speedscope(json.loads((folder / "rank_0.speedscope.json").read_bytes()))
    with gzip.open(folder / "rank_1.json.gz") as trace:
        operations = [one for one in json.load(trace)["traceEvents"] if one.get("cat") == "cpu_op"]
    assert "aten::mm" in {one["name"] for one in operations}
    assert all(one["tid"] == one["pid"] for one in operations)  # those of the main thread


def check_speedscope(file: dict[str, Any]) -> None:
    """Check it as the schema of speedscope does."""
    assert file["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = file["shared"]["frames"]
    assert all(type(frame["name"]) is type(frame["file"]) is str and type(frame["line"]) is int for frame in frames)
    assert file["profiles"][0]["name"] == "MainThread"
    for thread in file["profiles"]:
        assert (thread["type"], thread["unit"], thread["startValue"]) == ("sampled", "seconds", 0)
        assert len(thread["samples"]) == len(thread["weights"])
        assert thread["endValue"] == pytest.approx(sum(thread["weights"]))
        assert all(0 <= frame < len(frames) for stack in thread["samples"] for frame in stack)


def test_a_rank_that_keeps_the_gil_is_shown_and_one_that_ends_is_told(
    fit: Fit, thread: Callable[..., Future[Result]], tmp_path: Path
) -> None:
    def hang(config: dict[str, Any]) -> None:
        Path(config["pid"]).write_text(str(os.getpid()))
        distrain.report({})
        re.match(r"(a+)+$", "a" * 40 + "b")

    run = fit.storage / "run"
    training = thread(fit, hang, {"pid": str(tmp_path / "pid")}, name="run", workers=1)
    wait_for_reports(run)
    command = begin(run, "--seconds", "60")
    assert command.stdout is not None
    assert "rank 0 does not begin: native code in it keeps Python from running" in command.stdout.readline()
    assert re.search(r"rank 0 in match at test_profiles\.py:\d+", command.stdout.readline())
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert re.search("rank 0 has ended during its profile|the run has ended, and the profile", shown_by(command))
    assert command.returncode == 2
    with pytest.raises(WorkerGroupError):
        training.result(timeout=60.0)
    assert "run is not running: its state is failed; start it again" in shown_by(profile(run))

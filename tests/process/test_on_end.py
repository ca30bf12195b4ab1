"""The user's command for the end of a run, with real runs and real commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

import distrain
from distrain import BackendConfig, RunConfig, ScalingConfig, WorkerGroupError
from distrain.cli.drill_trial import _prepared
from distrain.console import on_end
from distrain.coordinator.requests import STOP
from distrain.coordinator.run import fit as fit_module
from distrain.drilling.order import Order
from distrain.storage.paths import RunPaths
from distrain.worker.job.job import FunctionWork
from tests.conftest import wait_until
from tests.process.conftest import ask_run, wait_for_reports

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from distrain import Result
    from tests.process.conftest import Fit

NOTE = 'echo "$DISTRAIN_RUN $DISTRAIN_STATUS $DISTRAIN_RUN_DIRECTORY|$DISTRAIN_SUMMARY" > {0}; cat >> {0}'


def fail() -> None:
    distrain.report({"loss": 0.5}, progress=(3, 10))
    distrain.collective.barrier()
    if distrain.get_context().get_world_rank() == 1:
        raise ValueError("boom\nand more")


def test_the_command_of_a_failed_run_learns_who_failed_where_and_why(fit: Fit, tmp_path: Path) -> None:
    with pytest.raises(WorkerGroupError):
        fit(fail, name="run", on_end=NOTE.format(tmp_path / "note"))
    about, summary = (tmp_path / "note").read_text().split("|")
    assert about == f"run failed {fit.storage}/run"
    first, metrics, again, more, end = summary.split("\n")
    assert (first, metrics, end) == (again, more, "")
    assert first.startswith("run failed after ")
    assert " at step 3 of 10 (30%): rank 1 on localhost: ValueError: boom (test_on_end.py:" in first
    assert metrics == "loss=0.5"


def test_the_environment_has_a_command_for_runs_without_their_own(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(on_end.VARIABLE, f"{NOTE.format(tmp_path / 'note')}; echo [$DISTRAIN_ON_END] >> {tmp_path}/note")
    fit(lambda: None, workers=0, on_end="")
    assert not (tmp_path / "note").exists()
    fit(lambda: None, workers=0, name="run")
    text = (tmp_path / "note").read_text()
    assert text.startswith("run finished ")
    assert text.endswith("\n[]\n")  # a run that the command starts does not run it again


def wait() -> None:
    while not distrain.should_stop():
        distrain.report({})
        time.sleep(0.01)


def test_a_stopped_run_says_so(fit: Fit, tmp_path: Path, thread: Callable[..., Future[Result]]) -> None:
    future = thread(fit, wait, name="run", on_end=NOTE.format(tmp_path / "note"))
    wait_for_reports(fit.storage / "run")
    ask_run(RunPaths(fit.storage / "run"), STOP)
    with pytest.raises(distrain.errors.PreemptionError):
        future.result(30.0)
    assert (tmp_path / "note").read_text().startswith("run stopped ")


def test_a_command_that_fails_is_one_warning(fit: Fit, capfd: pytest.CaptureFixture[str]) -> None:
    assert fit(lambda: 7, workers=0, on_end="echo said; exit 3").return_value == 7
    shown = capfd.readouterr()
    assert "said" in shown.err
    assert "said" not in shown.out
    assert shown.err.count("on_end: Command 'echo said; exit 3' returned non-zero exit status 3.") == 1


def are_dead(file: Path) -> bool:
    return not any(psutil.pid_exists(int(pid)) for pid in file.read_text().split())


def test_a_command_that_takes_too_long_is_killed_with_its_children(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_end, "_LIMIT_S", 1.0)
    pids = tmp_path / "pids"
    fit(lambda: None, workers=0, on_end=f"sleep 1000 & one=$!; setsid sleep 1000 & echo $$ $one $! > {pids}; wait")
    assert capsys.readouterr().err.count("on_end: the command was killed after 1 s: sleep 1000 & one=") == 1
    assert len(pids.read_text().split()) == 3
    wait_until(lambda: are_dead(pids), 5.0, "the end of the children")


SCRIPT = """
import distrain
run = distrain.RunConfig(storage_path="runs", on_end="echo $$ > pid.new; mv pid.new pid; sleep 1000")
result = distrain.DataParallelTrainer(
    lambda: 7, scaling_config=distrain.ScalingConfig(num_workers=0), run_config=run
).fit()
print(result.return_value)
"""


def test_ctrl_c_ends_the_command_and_not_the_run(tmp_path: Path) -> None:
    Path(tmp_path, "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            wait_until((tmp_path / "pid").exists, 30.0, "the command")
            process.send_signal(signal.SIGINT)
            shown, _ = process.communicate(timeout=20.0)
        finally:
            process.kill()
    assert (process.returncode, shown.splitlines()[-1]) == (0, "7")
    assert "on_end: Ctrl-C has ended the command" in shown
    wait_until(lambda: are_dead(tmp_path / "pid"), 5.0, "the end of the command")


def test_the_runs_of_a_check_have_no_end_to_tell(tmp_path: Path) -> None:
    environment = os.environ | {on_end.VARIABLE: f"touch {tmp_path}/note"}
    words = ["check", "--deep", "--num-workers", "2", "--on-end", f"touch {tmp_path}/own"]
    done = subprocess.run(
        [sys.executable, "-m", "distrain", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100.0,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_runs_of_a_drill_have_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "prepare", None)
    work = FunctionWork(function=fail, config={}, backend=BackendConfig())
    own = RunConfig(on_end="touch note", callbacks=[distrain.Observer()])
    trial = _prepared(Order(storage="runs", folder="."), work, ScalingConfig(), own)[2]
    assert (trial.on_end, trial.callbacks) == ("", ())

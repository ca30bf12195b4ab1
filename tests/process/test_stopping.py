"""Ctrl-C and SIGTERM of the user's process, with train functions that call should_stop() and others that do not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from distrain import PreemptionError, Result
from tests.conftest import wait_until
from tests.process.conftest import records
from tests.terminal import heed_hangups

sampled = pytest.mark.sample(3, of="stops")

SCRIPT = '''
import os, signal, sys, time
from pathlib import Path
import distrain
from distrain import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig

place = Path(os.environ["PLACE"])


def here(name):
    """Others may wait for it."""
    (place / f"{name}-{distrain.get_context().get_world_rank()}").touch()


def stop_at(step):
    """With a checkpoint of rank 0."""
    rank = distrain.get_context().get_world_rank()
    distrain.report({"step": step, "stopped": True}, Checkpoint.from_dict({"step": step}) if rank == 0 else None)
    (place / f"stopped-{rank}").write_text(str(step))


def resumed():
    checkpoint = distrain.get_checkpoint()
    return checkpoint.to_dict()["step"] + 1 if checkpoint else 0


@TRAIN@

def fit():
    run = RunConfig(
        name="run", storage_path=place / "runs", checkpoint_config=CheckpointConfig(missing_rank_s=0.0)
    )
    scaling = ScalingConfig(num_workers=int(os.environ["WORKERS"]))
    return distrain.DataParallelTrainer(train, scaling_config=scaling, run_config=run).fit()


if __name__ == "__main__":
    try:
        result = sweep(fit) if "SWEEP" in os.environ else fit()
    except distrain.PreemptionError as error:
        checkpoint = error.result and error.result.checkpoint
        print("PREEMPTED", error, checkpoint and Path(checkpoint.path).name, flush=True)
        raise
    except BaseException as error:
        print("ENDED", type(error).__name__, str(error), flush=True)
        raise
    print("FINISHED", result.return_value, flush=True)
'''

IN_STEP = """
def train():
    rank = distrain.get_context().get_world_rank()
    step = first = resumed()
    while step < first + 10_000:
        distrain.collective.barrier()
        time.sleep(0.001 * rank)
        if step == first + 3:
            here("trains")
        if os.environ.get("LAST") and step >= first + 5:
            return step
        if distrain.should_stop():
            stop_at(step)
            return step
        step += 1
"""
"""Every rank must come to every barrier: who stops at another call than the others leaves them waiting."""


@dataclass
class Running:
    """A user's process in the middle of training."""

    user: subprocess.Popen[str]
    place: Path

    def ask(self, number: int) -> None:
        self.user.send_signal(number)

    def end(self, timeout_s: float = 60.0) -> tuple[int, str, float]:
        """Exit code and output of the user's process, and how long it took, in seconds."""
        began = time.monotonic()
        output, _ = self.user.communicate(timeout=timeout_s)
        return self.user.returncode, output, time.monotonic() - began

    def wait_for(self, *names: str) -> None:
        paths = [self.place / name for name in names]
        wait_until(
            lambda: self.user.poll() is not None or all(path.exists() for path in paths), what=f"{names} are there"
        )
        assert self.user.poll() is None, self.user.communicate()[0]

    def stopped_at(self) -> dict[int, int]:
        """Rank -> the step at which it heard should_stop()."""
        return {int(path.name.partition("-")[2]): int(path.read_text()) for path in self.place.glob("stopped-*")}

    @property
    def run(self) -> Path:
        return self.place / "runs" / "run"


Start = Callable[..., Running]

AT_ONCE_S = 15.0
"""On a machine that has other things to do, too; the grace is 30 s or more where it is not to be waited for."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a user's process whose train_func is in ``source``."""
    started = []

    def begin(source: str, workers: int, **environment: str) -> Running:
        (tmp_path / "users_script.py").write_text(SCRIPT.replace("@TRAIN@", source))
        user = subprocess.Popen(
            [sys.executable, str(tmp_path / "users_script.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=heed_hangups,
            env={**os.environ, "PLACE": str(tmp_path), "WORKERS": str(workers), **environment},
        )
        started.append(user)
        return Running(user, tmp_path)

    yield begin
    for user in started:
        user.kill()
        user.wait()
        assert user.stdout is not None
        user.stdout.close()


# -- ranks that listen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "number", "code", "said"),
    [
        (0, signal.SIGTERM, 143, "PREEMPTED the run was stopped by SIGTERM"),
        (4, signal.SIGINT, -signal.SIGINT, "ENDED KeyboardInterrupt"),
    ],
)
def test_all_ranks_stop_at_the_same_call_and_the_run_goes_on_next_time(
    start: Start, workers: int, number: signal.Signals, code: int, said: str
) -> None:
    ranks = range(max(workers, 1))
    running = start(IN_STEP, workers=workers)
    running.wait_for(*(f"trains-{rank}" for rank in ranks))
    running.ask(number)
    exit_code, output, took_s = running.end()
    assert said in output
    assert exit_code == code
    assert took_s < AT_ONCE_S
    stopped_at = running.stopped_at()
    step = stopped_at[0]
    assert stopped_at == dict.fromkeys(ranks, step)
    result = Result.from_path(running.run)
    assert result.checkpoint is not None
    assert result.checkpoint.to_dict()["step"] == step
    assert {record["rank"] for record in records(running.run) if record["metrics"]["stopped"]} == set(ranks)
    assert json.loads((running.run / "run.json").read_text())["status"] == "stopped"
    if number == signal.SIGTERM:
        assert re.search(r"\ncontinue: .* checkpoint_000000\n", output.partition("PREEMPTED")[2])
        assert json.loads((running.run / "error.json").read_text())["type"] == "PreemptionError"
    exit_code, output, _ = start(IN_STEP, workers=workers, LAST="yes").end()
    assert exit_code == 0, output
    assert f"FINISHED {step + 6}" in output


@sampled
@pytest.mark.parametrize("workers", [0, 1])
def test_a_terminal_that_is_closed_takes_no_checkpoint_with_it(tmp_path: Path, workers: int) -> None:
    """The user's code prints into it afterwards, too."""
    source = """
import fcntl, termios

def train():
    here("trains")
    while not distrain.should_stop():
        time.sleep(0.001)
        print("still training")
    stop_at(7)
"""
    (tmp_path / "users_script.py").write_text(
        SCRIPT.replace("@TRAIN@", source).replace(
            "result = sweep(fit)", "fcntl.ioctl(0, termios.TIOCSCTTY, 0); result = sweep(fit)"
        )
    )
    ours, theirs = os.openpty()
    user = subprocess.Popen(
        [sys.executable, str(tmp_path / "users_script.py")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=heed_hangups,
        env={**os.environ, "PLACE": str(tmp_path), "WORKERS": str(workers)},
    )
    os.close(theirs)
    try:
        wait_until(lambda: os.read(ours, 1 << 16) and (tmp_path / "trains-0").exists(), what="it trains")
        os.close(ours)
        assert user.wait(timeout=60) == 128 + signal.SIGHUP
    finally:
        user.kill()
        user.wait()
    result = Result.from_path(tmp_path / "runs" / "run")
    assert isinstance(result.error, PreemptionError)
    assert result.checkpoint is not None
    assert result.checkpoint.to_dict()["step"] == 7


@sampled
@pytest.mark.parametrize("workers", [0, 1])
def test_a_hangup_that_is_ignored_stops_nothing(start: Start, workers: int) -> None:
    """As after ``nohup``."""
    source = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)

def train():
    here("trains")
    while not (place / "go").exists():
        time.sleep(0.001)
    return "undisturbed"
"""
    running = start(source, workers=workers)
    running.wait_for("trains-0")
    running.ask(signal.SIGHUP)
    (running.place / "go").touch()
    code, output, _ = running.end()
    assert code == 0, output
    assert "FINISHED undisturbed" in output


@sampled
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sweep_that_catches_errors_ends_with_the_process(start: Start, workers: int) -> None:
    source = """
def train():
    if (place / "stopped-0").exists():
        raise RuntimeError("the next trial has started")
    here("trains")
    while not distrain.should_stop():
        time.sleep(0.001)
    here("stopped")

def sweep(trial):
    for number in range(3):
        try:
            trial()
        except Exception as error:
            print("TRIAL", number, type(error).__name__, str(error).splitlines()[0], flush=True)
    return trial()
"""
    running = start(source, workers=workers, SWEEP="yes")
    running.wait_for("trains-0")
    running.ask(signal.SIGTERM)
    code, output, _ = running.end()
    refused = "PreemptionError SIGTERM stopped an earlier run, so this process won't start another; "
    assert "TRIAL 0 PreemptionError the run was stopped by SIGTERM" in output
    assert output.count(refused) == 2
    assert output.count("distrain: starting") + output.count("distrain: training") == 1
    assert code == 143


# -- without workers -------------------------------------------------------------------------------------------------


def has_handled(pid: int, number: int) -> bool:
    """It sleeps again, and the signal does not wait: two that wait are one."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    waiting = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return status["State"].startswith("S") and not waiting >> (number - 1) & 1


@sampled
def test_without_workers_the_second_signal_unwinds_train_func(start: Start) -> None:
    source = """
def train():
    distrain.should_stop()
    try:
        here("trains")
        time.sleep(1000)
    finally:
        here("unwound")
"""
    running = start(source, workers=0)
    running.wait_for("trains-0")
    running.ask(signal.SIGTERM)
    wait_until(lambda: has_handled(running.user.pid, signal.SIGTERM), what="the first signal is handled")
    assert running.user.poll() is None
    running.ask(signal.SIGTERM)
    code, output, took_s = running.end()
    assert "PREEMPTED" in output
    assert code == 143
    assert took_s < AT_ONCE_S
    assert (running.place / "unwound-0").exists()

"""Kills of one or two processes of a run: five seconds later no process of the run lives.

One run has every kind of worker that is hard to get rid of. The user's process is a child of the test, so that it can
be killed too. Two counts find what is left: by the run's id in the environment, and by a watch on every pid.
"""

from __future__ import annotations

import contextlib
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

import psutil
import pytest

from tests.conftest import NOTHING_LEFT_WITHIN_S, describe_processes, is_alive, run_members, wait_until
from tests.process.conftest import assert_no_half_checkpoint

USERS_SCRIPT = """
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path
import distrain
from distrain import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from distrain.api.backend import BackendConfig
from distrain.worker.job.job import FunctionWork
from distrain.coordinator.run.fit import run_work
from distrain.coordinator.connection.transport import Transport

place, grace_s, end = Path(sys.argv[1]), *sys.argv[2:]


def ready():
    rank = distrain.get_context().get_world_rank()
    (place / f"ready-{rank}.new").write_text(str(os.getpid()))
    (place / f"ready-{rank}.new").rename(place / f"ready-{rank}")


def checkpoint_forever():
    folder = place / "model"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(os.urandom(2_000_000))
    distrain.report({"step": 0}, checkpoint=Checkpoint(folder))
    ready()
    for step in range(1, 100_000):
        if (place / "end").exists():
            return
        distrain.report({"step": step}, checkpoint=Checkpoint(folder))
        time.sleep(0.02)


def sleep():
    ready()
    while not (place / "end").exists():
        time.sleep(0.01)
    if end == "raise":
        raise ValueError("the end")
    if end == "os._exit":
        os._exit(3)


def ignore_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sleep()


def hold_the_gil():
    if end:
        return sleep()
    lock, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)  # which does not release the GIL
    library.pthread_mutex_lock(lock)
    ready()
    library.pthread_mutex_lock(lock)  # waits for itself, whatever signals arrive


def with_grandchildren():
    subprocess.Popen(["setsid", "sleep", "1001"])
    subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; sleep 1002; sleep 1003"], start_new_session=True)
    sleep()


def with_daemons():
    for number, environment in (("1004", os.environ), ("1005", {})):  # the second one carries no id of the run
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                (place / f"sleep-{number}").write_text(str(os.getpid()))
                os.execve("/bin/sleep", ["sleep", number], environment)
            os._exit(0)
        os.wait()
    sleep()


WORKERS = [checkpoint_forever, sleep, ignore_signals, hold_the_gil, with_grandchildren, with_daemons]


def train():
    WORKERS[distrain.get_context().get_world_rank()]()


config = CheckpointConfig(missing_rank_s=0.0)  # the others never report
try:
    run_work(
        FunctionWork(function=train, config={}, backend=BackendConfig()),
        ScalingConfig(num_workers=len(WORKERS)),
        RunConfig(name="run", storage_path=place / "runs", stop_grace_s=float(grace_s), checkpoint_config=config),
        transports=(Transport(lease_s=float(os.environ["LEASE_S"]), ships=False),),
    )
except BaseException as error:
    print("ENDED", type(error).__name__, str(error).partition("\\n")[0], flush=True)
    if isinstance(error, distrain.PreemptionError):
        sys.exit(error.exit_code)
    raise
print("FINISHED", flush=True)
"""

WORKERS = 6
PATIENT_S = 600.0
"""A grace that is longer than any test."""


@dataclass
class Running:
    """A user's process in the middle of training, and every process of the run."""

    user: subprocess.Popen[str]
    place: Path
    guard: psutil.Process
    agent: psutil.Process
    forkserver: psutil.Process
    workers: list[psutil.Process]
    family: set[psutil.Process]

    def pids(self, *names: str) -> list[int]:
        named = {"user": self.user.pid, "guard": self.guard.pid}
        named |= {"agent": self.agent.pid, "forkserver": self.forkserver.pid}
        named |= {f"worker {rank}": worker.pid for rank, worker in enumerate(self.workers)}
        return [named[name] for name in names]

    def stop(self, *names: str) -> None:
        for name, pid in zip(names, self.pids(*names), strict=True):
            try:
                os.kill(pid, signal.SIGSTOP)
            except ProcessLookupError:  # the output tells why
                self.user.kill()
                pytest.fail(f"{name} has ended before it was stopped: {self.user.communicate()[0]}")

    def kill(self, *names: str) -> None:
        """Kill them all with SIGKILL, so that none has the time to notice the death of another."""
        self.stop(*names)
        for pid in self.pids(*names):
            with contextlib.suppress(ProcessLookupError):  # those who saw the first one go were quicker
                os.kill(pid, signal.SIGKILL)

    def end(self) -> tuple[int, str, float]:
        """Wait for the user's process. Return its exit code, its output, and the seconds until its end."""
        began = time.monotonic()
        output, _ = self.user.communicate(timeout=30.0)
        return self.user.returncode, output, time.monotonic() - began

    def survivors(self) -> list[psutil.Process]:
        return [member for member in self.family if is_alive(member)]


Launch = Callable[..., Running]


@pytest.fixture
def launch(tmp_path: Path, test_run_id: str) -> Iterator[Launch]:
    """Return a function that starts the user's process and waits until every worker is hard to kill."""
    started: list[Running | subprocess.Popen[str]] = []

    def start(*, grace_s: float = PATIENT_S, end: str = "", **environment: str) -> Running:
        script = tmp_path / "script.py"
        script.write_text(USERS_SCRIPT)
        user = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(grace_s), end],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "LEASE_S": "30", **environment},
            start_new_session=True,
        )
        started.append(user)
        ready = [tmp_path / f"ready-{rank}" for rank in range(WORKERS)]
        wait_until(
            lambda: user.poll() is not None or all(path.exists() for path in ready), what="all workers are ready"
        )
        assert user.poll() is None, user.communicate()[0]
        workers = [psutil.Process(int(path.read_text())) for path in ready]
        forkserver = workers[0].parent()
        assert forkserver is not None
        agent = forkserver.parent()
        assert agent is not None
        guard = agent.parent()
        assert guard is not None
        family = {psutil.Process(user.pid)}

        def all_sleep() -> bool:
            untraceable = tmp_path / "sleep-1005"
            if not untraceable.exists() or not untraceable.read_text():
                return False
            found = {*run_members(test_run_id), psutil.Process(int(untraceable.read_text()))}
            family.update(found)
            return sum(member.name() == "sleep" for member in found) == 4

        wait_until(all_sleep, what="all grandchildren are there")
        assert {*workers, forkserver, agent, guard} <= family
        return Running(user, tmp_path, guard, agent, forkserver, workers, family)

    yield start
    for member in run_members(test_run_id):  # the signal that was sent last counts
        with contextlib.suppress(psutil.Error):
            member.resume()
    for item in started:
        user = item.user if isinstance(item, Running) else item
        user.kill()
        user.wait()
        assert user.stdout is not None
        user.stdout.close()


def assert_nothing_is_left(running: Running, run_id: str) -> None:
    deadline = time.monotonic() + NOTHING_LEFT_WITHIN_S
    while (left := {*running.survivors(), *run_members(run_id)}) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, describe_processes(list(left))
    assert_no_half_checkpoint(running.place / "runs")
    for line in Path(running.place, "runs", "run", "metrics.jsonl").read_text().splitlines(keepends=True):
        assert not line.endswith("\n") or json.loads(line)


# -- one or two processes are killed ---------------------------------------------------------------------------------

LOST = "ENDED ControllerError localhost: distrain's process there has ended: "
KILLS = {
    ("user",): "",
    ("user", "guard"): "",
    ("user", "agent"): "",
    ("user", "worker 1"): "",
    ("worker 2",): "ENDED WorkerGroupError rank 2 on",
    ("worker 3",): "ENDED WorkerGroupError rank 3 on",
    ("worker 5",): "ENDED WorkerGroupError rank 5 on",
    ("forkserver",): "ENDED WorkerGroupError ranks 0-5 on",
    ("agent",): LOST,
    ("guard",): LOST,
    ("guard", "agent"): LOST,
    ("agent", "forkserver"): LOST,
    ("user", "agent", "forkserver", *(f"worker {rank}" for rank in range(WORKERS))): "",  # killall python
}
"""The error of fit(), by the processes that are killed."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("victims", KILLS, ids="+".join)
def test_nothing_is_left_after_a_kill(launch: Launch, test_run_id: str, victims: tuple[str, ...]) -> None:
    running = launch()
    running.kill(*victims)
    code, output, took_s = running.end()
    assert code == (-signal.SIGKILL if "user" in victims else 1)
    assert KILLS[victims] in output
    assert took_s < NOTHING_LEFT_WITHIN_S
    assert_nothing_is_left(running, test_run_id)


def test_the_next_run_on_the_host_ends_what_is_left_when_all_of_ours_were_killed(
    launch: Launch, test_run_id: str, tmp_path: Path
) -> None:
    """Guard, agent, forkserver and the user's process. The next run has another name."""
    (temporary := tmp_path / "tmp").mkdir()
    running = launch(TMPDIR=str(temporary))
    running.kill("user", "guard", "agent", "forkserver")
    wait_until(lambda: not {*running.workers} & {*running.survivors()}, what="the end of the ranks")
    assert sum(member.name() == "sleep" for member in running.survivors()) == 4
    next_run = "from distrain import DataParallelTrainer; DataParallelTrainer(lambda: None).fit()"
    environment = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run([sys.executable, "-c", next_run], cwd=tmp_path, env=environment, check=True, timeout=60.0)
    wait_until(lambda: len(running.survivors()) == 1, what="the end of all that can be known")
    (untraceable,) = running.survivors()
    assert untraceable.cmdline() == ["sleep", "1005"]
    untraceable.kill()
    assert not list(temporary.iterdir())


# -- some are stopped ------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("stopped", ["agent", "forkserver", "worker 1"])
def test_the_run_goes_on_when_the_users_process_is_dead_though_others_hang(
    launch: Launch, test_run_id: str, stopped: str
) -> None:
    running = launch()
    run = running.place / "runs" / "run"
    wait_until(lambda: list(run.glob("checkpoint_*")), what="there is a checkpoint")
    running.stop(stopped)
    running.kill("user")
    running.user.wait()
    source = """
import sys
import distrain
def train():
    return distrain.get_checkpoint().path
trainer = distrain.DataParallelTrainer(train, run_config=distrain.RunConfig(name="run", storage_path=sys.argv[1]))
print(trainer.fit().return_value)
"""
    again = subprocess.run(
        [sys.executable, "-c", source, str(running.place / "runs")], capture_output=True, text=True, check=True
    )
    assert again.stdout.strip() == str(max(run.glob("checkpoint_*")))
    assert not (run / ".staging").exists()
    assert_nothing_is_left(running, test_run_id)


@pytest.mark.parametrize(
    ("stopped", "said"),
    [
        (("agent", "guard"), "ENDED ControllerError localhost: it has been silent for 2 s: stopped (SIGSTOP)?"),
        (("forkserver",), r"the forkserver was silent for 2 s and is killed: was it stopped (SIGSTOP)?"),
    ],
    ids=["agent+guard", "forkserver"],
)
def test_one_that_is_stopped_is_lost_when_its_lease_is_over(
    launch: Launch, test_run_id: str, stopped: tuple[str, ...], said: str
) -> None:
    running = launch(LEASE_S="2")
    running.stop(*stopped)
    running.kill("worker 1")
    _, output, _ = running.end()
    assert said in re.sub(r"silent for [3-9] s", "silent for 2 s", output)
    assert_nothing_is_left(running, test_run_id)


# -- the user asks for the end ---------------------------------------------------------------------------------------


def test_a_second_ctrl_c_does_not_wait_for_the_grace(launch: Launch, test_run_id: str) -> None:
    running = launch()
    running.user.send_signal(signal.SIGINT)
    wait_until(lambda: not running.workers[1].is_running(), what="the worker that can be asked is gone")
    assert running.workers[2].is_running()
    running.user.send_signal(signal.SIGINT)
    code, output, took_s = running.end()
    assert code == -signal.SIGINT
    assert "ENDED KeyboardInterrupt" in output
    assert took_s < NOTHING_LEFT_WITHIN_S
    assert_nothing_is_left(running, test_run_id)


def test_ctrl_c_on_a_terminal_reaches_the_users_process_only(launch: Launch, test_run_id: str) -> None:
    running = launch(grace_s=0.3)
    os.killpg(running.user.pid, signal.SIGINT)  # as the terminal does
    code, output, took_s = running.end()
    assert code == -signal.SIGINT
    assert "ENDED KeyboardInterrupt" in output
    assert "WorkerGroupError" not in output
    assert took_s < NOTHING_LEFT_WITHIN_S
    assert_nothing_is_left(running, test_run_id)


def test_sigterm_of_the_users_process_stops_the_run_and_keeps_the_stacks_of_those_who_do_not_stop(
    launch: Launch, test_run_id: str
) -> None:
    running = launch(grace_s=0.2)
    running.user.send_signal(signal.SIGTERM)
    code, output, took_s = running.end()
    assert code == 143
    assert "ENDED PreemptionError the run was stopped by SIGTERM" in output
    assert took_s < NOTHING_LEFT_WITHIN_S
    assert_nothing_is_left(running, test_run_id)
    stacks = {path.name: path.read_text() for path in running.place.glob("runs/run/evidence/attempt_0/stacks/*")}
    assert set(stacks) == {"rank_2.txt", "rank_3.txt"}
    assert "in ignore_signals" in stacks["rank_2.txt"]
    assert "in hold_the_gil" in stacks["rank_3.txt"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("after_s", [0.0, 0.2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_signal_while_the_run_is_starting_leaves_nothing(
    tmp_path: Path, test_run_id: str, number: signal.Signals, after_s: float
) -> None:
    source = """
import subprocess, sys, time, distrain
def train():
    subprocess.Popen(["setsid", "sleep", "1006"])
    time.sleep(1000)
run = distrain.RunConfig(storage_path=sys.argv[1], stop_grace_s=0.2)
scaling = distrain.ScalingConfig(num_workers=3)
distrain.DataParallelTrainer(train, scaling_config=scaling, run_config=run).fit()
"""
    command = [sys.executable, "-c", source, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as user:
        assert user.stderr is not None
        try:
            assert b"starting 3 workers" in user.stderr.readline()
            time.sleep(after_s)
            user.send_signal(number)
            assert user.wait(timeout=NOTHING_LEFT_WITHIN_S) == -number
        finally:
            user.kill()
    wait_until(lambda: not run_members(test_run_id), timeout_s=NOTHING_LEFT_WITHIN_S, what="the census is empty")


# -- train_func comes to its end -------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("end", ["return", "raise", "os._exit"])
def test_what_train_func_started_ends_with_it(launch: Launch, test_run_id: str, end: str) -> None:
    running = launch(end=end)
    (running.place / "end").touch()
    code, output, took_s = running.end()
    assert (code, "FINISHED" in output) == ((0, True) if end == "return" else (1, False))
    assert took_s < NOTHING_LEFT_WITHIN_S
    assert_nothing_is_left(running, test_run_id)

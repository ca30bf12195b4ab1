"""pdb on a rank: of a running run, at breakpoint(), and where an exception was raised."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

import distrain
from distrain import Checkpoint, CheckpointConfig, FailureConfig, PreemptionError, Result, WorkerGroupError
from distrain.coordinator.requests import STOP
from distrain.storage.paths import RunPaths
from tests.conftest import wait_until
from tests.process.conftest import ask_run, files_of, log_of, reported, wait_for_reports

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from tests.process.conftest import Fit


class Debug:
    """A ``distrain debug`` that gets its lines from a pipe."""

    def __init__(self, run: Path, rank: int, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distrain", "debug", str(run), "-r", str(rank), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.shown = ""

    def type(self, *lines: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self.process.stdin.flush()

    def wait_for(self, text: str) -> None:
        """Read until this was shown once more."""
        before, output = self.shown.count(text), _of(self.process.stdout)
        while self.shown.count(text) == before:
            assert select.select([output], [], [], 20.0)[0], f"{text!r} is not shown:\n{self.shown}"
            new = os.read(output.fileno(), 1 << 16)
            assert new, f"{text!r} was not shown before the end:\n{self.shown}"
            self.shown += new.decode()

    def end(self) -> int:
        """Wait for the end, and return the exit code."""
        self.shown += self.process.communicate(timeout=30.0)[0].decode()
        return self.process.returncode


def _of(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def test_a_running_rank_is_stopped_and_steered_while_no_timer_runs(
    any_fit: Fit, thread: Callable[..., Future[Result]]
) -> None:
    def train() -> str:
        steps, ends = 0, False
        rank = distrain.get_context().get_world_rank()
        while rank == 1 and not ends:
            print("step", steps)
            time.sleep(0.02)
            steps += 1
        folder = Path(tempfile.mkdtemp())
        (folder / f"of_{rank}").touch()
        distrain.report({}, checkpoint=Checkpoint.from_directory(folder))
        distrain.collective.barrier()
        return "trained"

    run = any_fit.storage / "run"
    training = thread(
        any_fit,
        train,
        name="run",
        failure_config=FailureConfig(hang_report_s=6.0, hang_timeout_s=6.0),
        checkpoint_config=CheckpointConfig(missing_rank_s=6.0),
    )
    wait_until(lambda: (run / "logs/attempt_0/rank_1.log").exists() and "step" in log_of(run, 1), what="it trains")
    debug = Debug(run, rank=1)
    debug.wait_for("(Pdb) ")
    time.sleep(7.0)  # longer than each of the limits
    debug.type("p 'rank', rank, type(steps)", "w", "!ends = True", "n")
    debug.wait_for("-> ")
    debug.type("c")
    assert debug.end() == 0
    assert "('rank', 1, <class 'int'>)" in debug.shown
    assert "test_debugging.py" in debug.shown
    assert "run_worker" not in debug.shown  # the stack begins at train_func
    assert debug.shown.rstrip().endswith("rank 1 continues")
    result = training.result(timeout=60.0)
    assert set(files_of(result.checkpoint)) == {"of_0", "of_1"}


def test_it_stops_again_by_ctrl_c_and_at_its_own_breakpoints(
    fit: Fit, thread: Callable[..., Future[Result]], tmp_path: Path
) -> None:
    """It may stop in the library that forks, so what is typed does not depend on the frame."""

    def train(config: dict[str, Any]) -> int:
        def step(number: int) -> int:
            return number + 1

        number = 0
        while not Path(config["ends"]).exists():
            distrain.report({"number": number})
            number = step(number)
            if not (child := os.fork()):  # as a DataLoader does; it passes the breakpoints
                os._exit(step(-1))
            assert os.waitpid(child, 0)[1] == 0
            time.sleep(0.01)
        return number

    run, ends = fit.storage / "run", str(tmp_path / "ends")
    training = thread(fit, train, {"ends": ends}, name="run", workers=1)
    wait_for_reports(run)
    debug = Debug(run, rank=0)
    debug.wait_for("(Pdb) ")
    line = Path(__file__).read_text().splitlines().index("            return number + 1") + 1
    debug.type(f"b {__file__}:{line}", "c")
    debug.wait_for("return number + 1")
    debug.type("condition 1 number < 0", "c")
    debug.wait_for("New condition")
    reports = len(reported(run))
    wait_until(lambda: len(reported(run)) > reports + 5, what="it continues")
    debug.process.send_signal(signal.SIGINT)
    debug.wait_for("-> ")
    debug.type(f"!open({ends!r}, 'w').close()", "q")
    assert debug.end() == 0
    assert training.result(timeout=60.0).return_value is not None


def test_breakpoint_without_a_debugger_says_how_to_get_one(fit: Fit) -> None:
    with pytest.raises(WorkerGroupError, match=r"breakpoint\(\) in a worker needs a debugger: .*--debug-rank 0"):
        fit(lambda: breakpoint(), workers=1)


def test_a_breakpoint_waits_for_a_debugger_and_other_ranks_pass(
    fit: Fit, thread: Callable[..., Future[Result]], caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> str:
        found = "nothing"
        breakpoint()
        breakpoint()
        distrain.collective.barrier()
        return found

    run = fit.storage / "run"
    training = thread(fit, train, name="run", debug_rank=0)
    wait_until(lambda: "distrain debug" in caplog.text or training.done(), what="rank 0 waits")
    wrong = Debug(run, rank=7)
    assert wrong.end() == 2
    assert "there is no rank 7; the run has 2 workers, from 0" in wrong.shown
    debug = Debug(run, rank=0)
    debug.wait_for("(Pdb) ")
    second = Debug(run, rank=0)
    assert second.end() == 2
    assert "another `distrain debug` has rank 0" in second.shown
    debug.type("!found = 'it'", "q")  # the second breakpoint() is passed, too
    assert debug.end() == 0
    assert training.result(timeout=30.0).return_value == "it"


def test_a_stop_does_not_wait_for_a_rank_that_nobody_debugs_any_more(
    fit: Fit, thread: Callable[..., Future[Result]], tmp_path: Path
) -> None:
    """It is in native code, which no signal ends, when it is asked to stop for the debugger."""

    def train(config: dict[str, Any]) -> None:
        lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)

        def unlock() -> None:
            while not Path(config["returns"]).exists():
                time.sleep(0.01)
            ctypes.CDLL(None).pthread_mutex_unlock(mutex)

        threading.Thread(target=unlock, daemon=True).start()
        distrain.report({})
        lock(mutex)
        lock(mutex)
        time.sleep(60.0)

    run, returns = fit.storage / "run", tmp_path / "returns"
    training = thread(fit, train, {"returns": str(returns)}, name="run", workers=1, stop_grace_s=20.0)
    wait_for_reports(run)
    debug = Debug(run, rank=0)
    debug.wait_for("Ctrl-C ends the wait")
    while not debug.shown.endswith("\n"):
        debug.wait_for("\n")
    debug.process.send_signal(signal.SIGINT)
    assert debug.end() == 130
    assert debug.shown.endswith("\n\n")  # the prompt of the shell is not in the line with ^C
    ask_run(RunPaths(run), STOP)
    began = time.monotonic()
    returns.touch()
    with pytest.raises(PreemptionError) as raised:
        training.result(timeout=60.0)
    assert time.monotonic() - began < 15.0
    assert "channel.py" not in str(raised.value)


# -- after a failure -------------------------------------------------------------------------------------------------


def test_the_rank_to_debug_waits_where_it_has_failed(
    fit: Fit, thread: Callable[..., Future[Result]], caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        secret = 7
        raise ValueError(f"on purpose {secret}")

    run = fit.storage / "run"
    training = thread(fit, train, name="run", workers=1, debug_rank=0)
    wait_until(lambda: "distrain debug" in caplog.text or training.done(), what="rank 0 waits")
    assert "rank 0 has raised ValueError: on purpose 7 in train (test_debugging.py:" in caplog.text
    debug = Debug(run, rank=0)
    debug.wait_for("(Pdb) ")
    debug.type("p 'secret', secret")
    assert debug.end() == 0  # by Ctrl-D
    assert "('secret', 7)" in debug.shown
    assert debug.shown.rstrip().endswith("rank 0 fails now")
    with pytest.raises(WorkerGroupError, match="on purpose 7"):
        training.result(timeout=30.0)

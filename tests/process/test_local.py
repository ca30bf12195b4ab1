"""num_workers=0: train_func runs in this process, and the run directory is the same as with a worker."""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import distrain
from distrain import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    DistrainError,
    FailureConfig,
    LaunchError,
    Result,
    RunConfig,
    ScalingConfig,
    StorageError,
    TrainingFailedError,
    WorkerGroupError,
)
from distrain.api import current
from distrain.coordinator.ranks.this_process import OwnRank
from tests.process.conftest import files_of, reported

Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def local(storage: Path) -> Callable[..., Result]:
    """Train in this process. What is neither config nor scaling goes into the RunConfig."""

    def fit(
        function: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        *,
        workers: int = 0,
        max_failures: int = 0,
        **run: Any,
    ) -> Result:
        return DataParallelTrainer(
            function,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(
                **{"storage_path": storage, "failure_config": FailureConfig(max_failures=max_failures), **run}
            ),
        ).fit()

    return fit


Local = Callable[..., Result]


def run_json(path: str | Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(Path(path, "run.json").read_text())
    return manifest


def epochs(config: dict[str, Any]) -> int:
    """Train ``epochs`` epochs from the last checkpoint on; raise in epoch ``fail_at``, of the first attempt only."""
    checkpoint = distrain.get_checkpoint()
    start = int(Path(checkpoint.path, "epoch").read_text()) + 1 if checkpoint else 0
    for epoch in range(start, config["epochs"]):
        if epoch == config.get("fail_at") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise config["error"]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "epoch").write_text(str(epoch))
            distrain.report({"epoch": epoch, "loss": -abs(epoch - 1)}, Checkpoint(folder))
    return start


# -- the same as with a worker ---------------------------------------------------------------------------------------


def tree(path: str) -> dict[str, str]:
    """Contents of a run directory: relative path -> contents, without what differs or is there by chance."""
    times = {"started", "training", "ended", "updated", "time", "seconds", "waits"}
    volatile = {*times, "run_id", "argv", "scaling_config", "name"}

    def steady(text: str) -> Any:
        return json.loads(text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if k not in volatile})

    found = {}
    for file in sorted(Path(path).rglob("*")):
        name = str(file.relative_to(path))
        if not file.is_file() or name in (".lock",) or name.startswith(("logs/", "evidence/")):
            continue
        if file.suffix == ".json":
            found[name] = steady(file.read_text())
        elif file.suffix == ".jsonl":
            found[name] = [steady(line) for line in file.read_text().splitlines()]
        else:
            found[name] = file.read_bytes()
    return found


def test_the_run_directory_is_that_of_one_worker(local: Local) -> None:
    keep = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="max")
    results = [local(epochs, {"epochs": 5}, workers=n, name=f"with-{n}", checkpoint_config=keep) for n in (0, 1)]
    assert tree(results[0].path) == tree(results[1].path)
    assert (results[0].metrics, results[0].return_value) == (results[1].metrics, results[1].return_value)
    assert files_of(results[0].checkpoint) == files_of(results[1].checkpoint)
    for result in results:
        assert [Path(c.path).name for c, _ in result.best_checkpoints] == ["checkpoint_000002", "checkpoint_000001"]
    assert reported(results[0].path) == [{"epoch": epoch, "loss": -abs(epoch - 1)} for epoch in range(5)]
    assert run_json(results[0].path)["status"] == "finished"
    assert Result.from_path(results[0].path).metrics == results[0].metrics


# -- in this very process --------------------------------------------------------------------------------------------


def test_it_runs_here_and_nothing_is_pickled(local: Local) -> None:
    def train(config: dict[str, Any]) -> int:
        with config["lock"]:
            here.append((os.getpid(), threading.current_thread()))
        return len(here)

    here: list[Any] = []
    assert local(train, {"lock": threading.Lock()}).return_value == 1
    assert here == [(os.getpid(), threading.current_thread())]


def test_this_process_is_afterwards_as_before(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> list[Any]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return [dict(os.environ), handlers, os.getcwd(), list(sys.path), list(sys.argv), sys.modules["__main__"]]

    def train() -> None:
        inside.append(dict(os.environ))
        random.random()

    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("SET_HERE", "by the user")
    inside: list[dict[str, str]] = []
    before = state()
    random.seed(5)
    local(train, worker_runtime_env={"env_vars": {"SET_HERE": "by the run", "NEW_HERE": "new"}})
    assert state() == before
    assert current.session is None
    assert (inside[0]["SET_HERE"], inside[0]["NEW_HERE"], inside[0]["RANK"]) == ("by the run", "new", "0")
    assert inside[0]["MASTER_PORT"] != "1"
    after = random.random()
    random.seed(5)
    random.random()
    assert random.random() == after


def test_two_threads_cannot_train_here_at_once(local: Local) -> None:
    """They would restore environment and path of this process in the wrong order."""

    def train() -> None:
        began.set()
        assert may_end.wait(60)

    began, may_end = threading.Event(), threading.Event()
    thread = threading.Thread(target=local, args=[train])
    thread.start()
    assert began.wait(60)
    try:
        with pytest.raises(LaunchError, match="another thread is already training in this process"):
            local(lambda: None)
    finally:
        may_end.set()
        thread.join()
    assert local(lambda: "afterwards").return_value == "afterwards"


def test_a_signal_ends_a_child_of_train_func_that_calls_should_stop(local: Local) -> None:
    def train() -> int:
        distrain.should_stop()
        began, begins = os.pipe()
        child = os.fork()
        if not child:
            atexit._clear()  # those of pytest delete the directories of earlier runs, which can take long
            os.write(begins, b"!")  # before that, the interpreter may drop a signal
            while True:  # not signal.pause(), which would miss a signal that arrives right before it
                time.sleep(0.05)
        os.read(began, 1)
        os.kill(child, signal.SIGTERM)
        for _ in range(200):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return 0

    assert local(train).return_value == 128 + signal.SIGTERM


def test_the_run_ends_if_this_process_cannot_be_a_rank(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    threads = threading.active_count()
    monkeypatch.setattr(OwnRank, "_be_rank", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        local(lambda: None, max_failures=-1)
    assert threading.active_count() == threads


# -- where it must not run -------------------------------------------------------------------------------------------


def nested(config: dict[str, Path]) -> str:
    run = RunConfig(storage_path=config["storage"])
    trainer = DataParallelTrainer(lambda: 1, scaling_config=ScalingConfig(num_workers=0), run_config=run)
    try:
        trainer.fit()
    except LaunchError as error:
        return str(error)
    return "nothing was raised"


def test_within_a_rank_it_is_refused(local: Local, tmp_path: Path) -> None:
    result = local(nested, {"storage": tmp_path / "inner"})
    assert "fit() with num_workers=0 was called in a distrain worker" in result.return_value
    assert "call the function itself" in result.return_value
    assert not (tmp_path / "inner").exists()


# -- how it fails ----------------------------------------------------------------------------------------------------


def test_the_exception_is_the_very_one_that_was_raised(local: Local) -> None:
    class CannotBePickled(Exception):
        def __init__(self, one: int, two: object) -> None:
            super().__init__(f"{one}")
            self.two = two

    def train() -> None:
        variable = "for the debugger"
        distrain.report({"loss": 1})
        assert variable
        raise error

    error = CannotBePickled(1, threading.Lock())
    with pytest.raises(WorkerGroupError, match="CannotBePickled: 1") as raised:
        local(train)
    assert raised.value.original is error
    assert raised.value.worker_failures[0] is error
    assert (raised.value.culprit, raised.value.exit_code) == (0, 1)
    innermost = list(traceback.walk_tb(error.__traceback__))[-1][0]  # where pdb.post_mortem() stops
    assert innermost.f_code is train.__code__
    assert innermost.f_locals["variable"] == "for the debugger"
    assert raised.value.result.metrics == {"loss": 1}
    stored = Result.from_path(raised.value.result.path).error
    assert "CannotBePickled: 1" in str(stored)


@pytest.mark.parametrize(
    ("workers", "error"),
    [(0, ValueError("no")), (1, ValueError("no")), (0, KeyboardInterrupt()), (0, SystemExit(3)), (1, threading.Lock())],
)
def test_the_traceback_ends_where_fit_was_called(local: Local, workers: int, error: Any) -> None:
    """The failure screen has the rest. The lock cannot be pickled, which ends fit() before anything starts."""
    with pytest.raises((DistrainError, KeyboardInterrupt)) as raised:
        local(epochs, {"epochs": 1, "fail_at": 0, "error": error}, workers=workers)
    shown = "".join(traceback.format_exception(raised.type, raised.value, raised.value.__traceback__))
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert frames[-2:] == ["fit", "fit"]  # that of this module, and ours
    assert shown.count("Traceback") == 1 + ("ValueError: no" in shown)  # itself, and that in the screen
    assert "another exception" not in shown
    assert "direct cause" not in shown


def test_sys_exit_with_a_code_is_a_failure(local: Local) -> None:
    with pytest.raises(WorkerGroupError, match=r"sys\.exit") as raised:
        local(lambda: sys.exit(3))
    assert raised.value.exit_code == 3
    assert isinstance(raised.value.original, SystemExit)


# -- a run directory that cannot be written --------------------------------------------------------------------------


def spoil(run: Path) -> None:
    """No checkpoint can be staged any more. (Permissions would not stop root.)"""
    Path(run, ".staging").write_text("in the way")


def test_a_run_directory_that_fails_ends_the_run_also_if_train_func_goes_on(local: Local) -> None:
    def train() -> str:
        spoil(Path(distrain.get_context().get_trial_dir()))
        report = partial(distrain.report, {}, Checkpoint.from_dict({}))
        for call in (report, report, distrain.get_checkpoint):
            try:
                call()
            except Exception as error:
                errors.append(type(error))
        return "done"

    errors: list[type[Exception]] = []

    with pytest.raises(TrainingFailedError, match="cannot write a checkpoint"):
        local(train)
    assert errors == [StorageError] * 3


# -- the command line ------------------------------------------------------------------------------------------------


def test_a_script_runs_in_the_process_of_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, distrain, helper\n"
        "distrain.report({'argument': sys.argv[1], 'name': __name__, 'answer': helper.ANSWER})\n"
        "print(input(), os.getppid(), distrain.get_context().get_world_size())\n"
    )
    (tmp_path / "helper.py").write_text("ANSWER = 42\n")
    command = [sys.executable, "-m", "distrain.launch", "--num-workers", "0", "--storage-path", str(tmp_path / "runs")]
    run = subprocess.run(
        [*command, str(script), "argument"], input="typed\n", capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout) == (0, f"typed {os.getpid()} 1\n"), run.stderr
    [folder] = (tmp_path / "runs").iterdir()
    assert reported(folder) == [{"argument": "argument", "name": "__main__", "answer": 42}]

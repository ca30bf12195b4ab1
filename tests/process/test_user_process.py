"""fit() in the user's process: it leaves nothing behind, and several may run at once."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import pytest

import distrain
from distrain import Result, WorkerGroupError
from distrain.coordinator.connection import resting_agents
from tests.process.conftest import Fit, log_of

if TYPE_CHECKING:
    from pathlib import Path

Script = Callable[..., "subprocess.CompletedProcess[str]"]


def open_fds() -> list[str]:
    gc.collect()
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{entry} -> {os.readlink(f'/proc/self/fd/{entry}')}")
        except OSError:  # that of the listing
            continue
    return sorted(found)


def succeed() -> None:
    distrain.report({"loss": 1})


def fail() -> None:
    raise ValueError("no")


def die() -> None:
    os._exit(3)


def test_neither_descriptors_nor_children_nor_handlers_are_left(any_fit: Fit) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    threads = threading.active_count()
    path, directory, environment = list(sys.path), os.getcwd(), dict(os.environ)
    any_fit(succeed)
    resting_agents.close()
    before = open_fds()
    for function in (succeed, fail, die):
        if function is succeed:
            any_fit(function)
        else:
            with pytest.raises(WorkerGroupError):
                any_fit(function)
    resting_agents.close()
    assert open_fds() == before
    assert psutil.Process().children(recursive=True) == []
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads
    assert (sys.path, os.getcwd(), dict(os.environ)) == (path, directory, environment)


def test_several_fits_in_threads_at_once(fit: Fit) -> None:
    results: list[Result] = []
    threads = [threading.Thread(target=lambda: results.append(fit(succeed))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result.path for result in results}) == 4


def test_fit_works_in_a_forked_child(fit: Fit) -> None:
    """As in a search over hyperparameters with multiprocessing."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: os._exit(7 if fit(succeed).metrics == {"loss": 1} else 1))
    child.start()
    child.join()
    assert child.exitcode == 7


def test_large_configs_and_return_values_arrive(any_fit: Fit) -> None:
    data = os.urandom(20_000_000)
    assert any_fit(lambda config: config["data"], {"data": data}).return_value == data


@pytest.mark.parametrize("redirections", ["<&-", "<&- >&- 2>&-", ">/dev/full"])
def test_closed_standard_streams_do_no_harm(tmp_path: Path, redirections: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys
import distrain
def train():
    print("hello")
    os.write(2, b"error\\n")
    distrain.report({"done": 1})
run = distrain.RunConfig(storage_path=sys.argv[1], name="run")
distrain.DataParallelTrainer(train, run_config=run).fit()
""")
    command = f"{sys.executable} {script} {tmp_path} {redirections}"
    subprocess.run(command, shell=True, capture_output=True, timeout=30)
    assert Result.from_path(tmp_path / "run").metrics == {"done": 1}
    assert log_of(tmp_path / "run", 0) == "hello\nerror\n"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"

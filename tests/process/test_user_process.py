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
from tests.process.conftest import Fit, log_of, reported

if TYPE_CHECKING:
    from pathlib import Path

Script = Callable[..., "subprocess.CompletedProcess[str]"]
AT_ONCE = 5


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


def test_a_low_limit_of_open_files_is_no_limit_to_workers(storage: Path) -> None:
    script = """
import resource, sys
import distrain
def train():
    distrain.report({"limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0]})
resource.setrlimit(resource.RLIMIT_NOFILE, (48, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
run = distrain.RunConfig(storage_path=sys.argv[1], name="run")
distrain.DataParallelTrainer(train, scaling_config=distrain.ScalingConfig(num_workers=8), run_config=run).fit()
"""
    subprocess.run([sys.executable, "-c", script, str(storage)], check=True, timeout=60)
    assert reported(str(storage / "run")) == [{"limit": 48}] * 8


def test_large_configs_and_return_values_arrive(any_fit: Fit) -> None:
    data = os.urandom(20_000_000)
    assert any_fit(lambda config: config["data"], {"data": data}).return_value == data


@pytest.mark.sample(2)
@pytest.mark.parametrize("redirections", ["<&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full"])
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


MEET = """
import os, sys, time
from pathlib import Path
import distrain
def train():
    place = Path(sys.argv[1])
    (place / f"run-{sys.argv[2]}").touch()
    while len(list(place.glob("run-*"))) < int(sys.argv[3]):
        time.sleep(0.005)
    distrain.report({"port": os.environ["MASTER_PORT"]})
run = distrain.RunConfig(storage_path=Path(sys.argv[1], "runs"), name=f"run-{sys.argv[2]}")
scaling = distrain.ScalingConfig(num_workers=2)
distrain.DataParallelTrainer(train, scaling_config=scaling, run_config=run).fit()
"""


def test_runs_started_at_once_do_not_collide(tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    users = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(number), str(AT_ONCE)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(AT_ONCE)
    ]
    for user in users:
        said, _ = user.communicate(timeout=60)
        assert user.returncode == 0, said
    ports = [metrics["port"] for run in (tmp_path / "runs").iterdir() for metrics in reported(run, rank=0)]
    assert len(set(ports)) == AT_ONCE


def test_neither_coordinator_nor_agent_needs_torch(user_script: Script, tmp_path: Path, storage: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for name in ("torch", "pandas", "numpy", "IPython"):
        (site / f"{name}.py").write_text(f"raise ImportError('{name} must not be imported')\n")
    source = f"""
import distrain
run = distrain.RunConfig(storage_path={str(storage)!r})
print(distrain.DataParallelTrainer(lambda: "no torch", run_config=run).fit().return_value)
"""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    completed = user_script(source, env={**os.environ, "PYTHONPATH": path})
    assert completed.stdout == "no torch\n", completed.stderr

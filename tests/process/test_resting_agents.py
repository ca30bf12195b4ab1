"""A second fit() in one process: it takes over the forkserver of the first, if nothing has changed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import distrain
from distrain.coordinator.connection import resting_agents
from tests.conftest import is_alive, run_members, wait_until
from tests.process.conftest import log_of, records

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.process.conftest import Fit


def look(config: dict[str, Any]) -> dict[str, Any]:
    print("says", config)
    scratch = os.environ["DISTRAIN_SCRATCH"]
    found = os.listdir(scratch)
    made = tempfile.mkdtemp(dir=scratch)
    return {
        "parent": os.getppid(),
        "config": config,
        "random": random.random(),
        "environment": dict(os.environ),
        "found": found,
        "made": os.path.basename(made),
        "attempt": distrain.get_context().attempt,
    }


def test_a_second_fit_has_the_same_forkserver_and_nothing_else_of_the_first(fit: Fit) -> None:
    first, second = fit(look, {"n": 1}), fit(look, {"n": 2 * "two"})
    one, two = first.return_value, second.return_value
    assert one["parent"] == two["parent"]
    assert (one["config"], two["config"]) == ({"n": 1}, {"n": "twotwo"})
    assert one["random"] != two["random"]
    assert one["attempt"] == two["attempt"] == 0
    assert one["made"] not in two["found"]
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT"):
        assert one["environment"].pop(name) != two["environment"].pop(name)
    assert one["environment"] == two["environment"]
    assert [log_of(result.path, 0).strip() for result in (first, second)] == ["says {'n': 1}", "says {'n': 'twotwo'}"]
    assert {record["attempt"] for record in records(second.path)} <= {0}


PACKAGE = """
import pathlib, sys
sys.path.append(pathlib.Path("/somewhere"))  # Python ignores it
VERSION = 1
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "edited_package.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))
    return site


def edit_a_package(site: Path) -> None:
    (site / "edited_package.py").write_text(PACKAGE.replace("1", "2"))


def kill_the_forkserver(site: Path) -> None:
    _kill_resting("forkserver")


def kill_the_agent(site: Path) -> None:
    _kill_resting("agent")


def _kill_resting(program: str) -> None:
    guard = psutil.Process(resting_agents._resting[0].link._process.pid)
    victims = [child for child in guard.children(recursive=True) if program in child.cmdline()]
    victims[0].kill()
    wait_until(lambda: not is_alive(victims[0]))


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", [edit_a_package, kill_the_forkserver, kill_the_agent])
def test_after_a_change_there_is_a_new_forkserver(fit: Fit, site: Path, change: Callable[[Path], None]) -> None:
    def train() -> tuple[int, int]:
        import edited_package

        return os.getppid(), edited_package.VERSION

    first = fit(train).return_value
    assert fit(train).return_value == first
    change(site)
    parent, version = fit(train).return_value
    assert parent != first[0]
    assert version == (2 if change is edit_a_package else 1)


def test_an_agent_is_taken_over_only_if_it_has_inherited_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    umask = os.umask(0o022)
    before = resting_agents.inherited_state(["python"])
    assert resting_agents.inherited_state(["python"]) == before
    assert resting_agents.inherited_state(["python3"]) != before
    changes = (
        lambda patch: patch.setenv("SOME_LIBRARY_READS_IT", "1"),
        lambda patch: patch.chdir(tmp_path),
        lambda patch: os.umask(0o077),
    )
    try:
        for change in changes:
            with monkeypatch.context() as patch:
                change(patch)
                assert resting_agents.inherited_state(["python"]) != before
    finally:
        os.umask(umask)


def test_fits_in_threads_have_a_forkserver_each(fit: Fit) -> None:
    together = threading.Barrier(2, timeout=60)

    def run(number: int) -> int:
        together.wait()
        parent: int = fit(look, {"n": number}, name=f"{number}-{time.time_ns()}").return_value["parent"]
        return parent

    with ThreadPoolExecutor(2) as pool:
        first, second = (set(pool.map(run, range(2))) for _ in range(2))
    assert len(first) == len(second) == 2


def test_none_rests_if_the_user_wants_none(fit: Fit, monkeypatch: pytest.MonkeyPatch, test_run_id: str) -> None:
    monkeypatch.setenv("DISTRAIN_IDLE_S", "0")
    fit(look)
    assert not run_members(test_run_id)
    monkeypatch.setenv("DISTRAIN_IDLE_S", "long")
    with pytest.raises(ValueError, match="DISTRAIN_IDLE_S='long'"):
        fit(look)


def test_an_agent_ends_when_it_has_rested_for_long(fit: Fit, monkeypatch: pytest.MonkeyPatch, test_run_id: str) -> None:
    monkeypatch.setattr(resting_agents, "_MARGIN_S", 0.2)
    monkeypatch.setenv("DISTRAIN_IDLE_S", "0.5")
    first = fit(look).return_value["parent"]
    assert resting_agents._resting
    wait_until(lambda: not run_members(test_run_id), timeout_s=5)
    assert fit(look).return_value["parent"] != first


SCRIPT = """
import os, signal, sys
import distrain
from distrain import DataParallelTrainer, RunConfig, ScalingConfig

def train():
    return os.getppid()

def fit():
    config = RunConfig(storage_path=sys.argv[1])
    return DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=1), run_config=config).fit().return_value

if __name__ == "__main__":
    first = fit()
    if sys.argv[2] == "fork":
        child = os.fork()
        if child == 0:
            assert fit() != first
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert fit() == first
    print(first, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "os._exit":
        os._exit(0)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("end", ["exit", "os._exit", "killed", "fork"])
def test_nothing_is_left_of_a_users_process(tmp_path: Path, test_run_id: str, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "error", "-X", "dev", str(script), str(tmp_path / "runs"), end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0), done.stderr
    assert "Warning" not in done.stderr
    if end in ("exit", "fork"):
        assert not run_members(test_run_id)
    wait_until(lambda: not run_members(test_run_id), timeout_s=5)

"""Hostfiles from end to end, with a program named ssh that reaches "hosts" on this machine; needs no root."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distrain
from distrain import (
    BackendConfig,
    LaunchError,
    Result,
    RunConfig,
    ScalingConfig,
    ShippingConfig,
    WorkerGroupError,
)
from distrain.coordinator.run.fit import run_work
from distrain.system import process
from distrain.worker.job.job import FunctionWork, ScriptWork
from tests.nvml import make_driver
from tests.process.conftest import reported

FAKE_SSH = """\
#!/bin/sh
printf '%s\\n' "$@" >>{log}
while [ "$1" != -- ]; do shift; done
host=$2 command=$3
{first}
cd / && exec env -i HOME=/homes/$host PATH=/usr/bin:/bin sh -c "$command"
"""

FitOn = Callable[..., Result]


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a program named ssh first on PATH, which runs ``first``, lines of shell, and then the command.

    Return the file in which it logs its arguments.
    """
    log = tmp_path / "ssh.log"
    (tmp_path / "bin").mkdir()

    def make(first: str = "") -> Path:
        program = tmp_path / "bin" / "ssh"
        program.write_text(FAKE_SSH.format(log=log, first=first))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        return log

    return make


@pytest.fixture
def fit_on(storage: Path) -> FitOn:
    """Return ``fit_on(function, num_workers=..., hosts=...)``; ``run`` holds arguments of the RunConfig."""

    def fit(function: Callable[..., Any], run: dict[str, Any] | None = None, **scaling: Any) -> Result:
        return run_work(
            FunctionWork(function=function, config={}, backend=BackendConfig()),
            ScalingConfig(**scaling),
            RunConfig(storage_path=storage, **(run or {})),
        )

    return fit


def where_am_i() -> None:
    names = ("HOME", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    distrain.report({name: os.environ[name] for name in names})


def test_ranks_are_placed_by_slots(ssh: Callable[..., Path], fit_on: FitOn, tmp_path: Path) -> None:
    log = ssh()
    (tmp_path / "hosts").write_text("one slots=2\nme@two:2222 slots=1\n[fd77::3] slots=3\n")
    result = fit_on(where_am_i, num_workers=5, hostfile=tmp_path / "hosts", ssh_args="-F 'my config'")
    reports = [reported(result.path, rank)[0] for rank in range(5)]
    places = [(r["HOME"], r["LOCAL_RANK"], r["LOCAL_WORLD_SIZE"], r["NODE_RANK"]) for r in reports]
    assert places == [
        ("/homes/one", "0", "2", "0"),
        ("/homes/one", "1", "2", "0"),
        ("/homes/two", "0", "1", "1"),
        ("/homes/fd77::3", "0", "2", "2"),
        ("/homes/fd77::3", "1", "2", "2"),
    ]
    assert {(r["MASTER_ADDR"], r["GLOO_SOCKET_IFNAME"]) for r in reports} == {("127.0.0.1", "lo")}
    arguments = log.read_text().splitlines()
    assert arguments[arguments.index("2222") - 1 :][:4] == ["-p", "2222", "-l", "me"]
    assert arguments.count("my config") == 3


@pytest.fixture
def six_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a driver that shows six GPUs on every host. Return the lines that ssh must run first."""
    driver = make_driver(tmp_path / "driver")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("FAKE_GPUS", "gggggg")
    return f"command='export LD_LIBRARY_PATH={driver} FAKE_GPUS=gggggg; '$command"


def test_the_gpus_of_the_hostfile_are_those_that_its_ranks_see(
    ssh: Callable[..., Path], fit_on: FitOn, tmp_path: Path, six_gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable for all workers does not replace them."""

    def train() -> None:
        distrain.report({"shown": os.environ.get("CUDA_VISIBLE_DEVICES")})

    def shown(**scaling: Any) -> list[str | None]:
        run = {"worker_runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": "1"}}}
        result = fit_on(train, run, num_workers=4, hostfile=tmp_path / "hosts", **scaling)
        return [reported(result.path, rank)[0]["shown"] for rank in range(4)]

    ssh(six_gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    (tmp_path / "hosts").write_text("one gpus=0,2\ntwo\nlocalhost gpus=5\n")
    assert shown() == ["0,2", "0,2", "1", "5"]
    with pytest.raises(LaunchError, match=r"two: CUDA_VISIBLE_DEVICES=1 .*Write gpus=1 behind the host"):
        shown(use_gpu=True)
    (tmp_path / "hosts").write_text("one gpus=0,2\ntwo gpus=1\nlocalhost gpus=5\n")
    assert shown(use_gpu=True) == ["0,2", "0,2", "1", "5"]


def test_all_hosts_are_contacted_at_the_same_time(ssh: Callable[..., Path], fit_on: FitOn, tmp_path: Path) -> None:
    """No host answers before all were asked."""
    seen = shlex.quote(str(tmp_path))
    ssh(f"touch {seen}/asked-$host; until [ $(ls {seen} | grep -c asked-) = 3 ]; do sleep 0.02; done")
    fit_on(where_am_i, num_workers=3, hosts="one:1,two:1,three:1")


def test_a_hostfile_with_localhost_needs_no_ssh(
    ssh: Callable[..., Path], fit_on: FitOn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that call fit() themselves must not use the hostfile."""

    def train() -> None:
        distrain.report({"host": socket.gethostname(), "hostfile": os.environ.get("DISTRAIN_HOSTFILE")})

    log = ssh()
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    monkeypatch.setenv("DISTRAIN_HOSTFILE", str(tmp_path / "hosts"))
    result = fit_on(train, num_workers=2)
    assert reported(result.path) == [{"host": socket.gethostname(), "hostfile": None}] * 2
    assert not log.exists()


def test_nothing_but_the_list_goes_along(
    ssh: Callable[..., Path], fit_on: FitOn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train() -> None:
        names = ("NCCL_DEBUG", "MY_SECRET", "GIVEN", "DISTRAIN_X")
        distrain.report({"cwd": os.getcwd(), **{name: os.environ.get(name) for name in names}})

    log = ssh()
    for name in ("NCCL_DEBUG", "MY_SECRET", "DISTRAIN_X"):
        monkeypatch.setenv(name, "value-17")
    monkeypatch.chdir(tmp_path)
    run = {"worker_runtime_env": {"env_vars": {"GIVEN": "value-17"}}}
    [report] = reported(fit_on(train, run, hosts="one:1").path)
    expected = {"NCCL_DEBUG": "value-17", "MY_SECRET": None, "GIVEN": "value-17", "DISTRAIN_X": None}
    assert report == {"cwd": str(tmp_path), **expected}
    assert "value-17" not in log.read_text()


# -- what a host may lack --------------------------------------------------------------------------------------------


def failure(fit_on: FitOn, hostfile: Path, line: str, **run: Any) -> str:
    hostfile.write_text(f"localhost\n{line}\n")
    began = time.monotonic()
    with pytest.raises(LaunchError) as raised:
        fit_on(where_am_i, run, num_workers=2, hostfile=hostfile)
    assert time.monotonic() - began < 8.0
    return str(raised.value)


@pytest.mark.parametrize(
    ("first", "line", "start", "words"),
    [
        (
            "",
            "far python=/nowhere/bin/python",
            "far: distrain's process there has ended: exit code 127, there is no such program: correct python=",
            "/nowhere/bin/python",
        ),
        (
            "",
            "far cwd=/nowhere",
            "far: no worker can run in /nowhere: No such file or directory; create it, or set cwd=",
            "",
        ),
        (
            "echo 'ssh: connect to host far port 22: Connection refused' >&2; exit 255",
            "far",
            "far: distrain's process there has ended: exit code 255, which is ssh's when it cannot connect or log in",
            "Connection refused\ncheck that sshd runs on far, and at this port\nthis must work without asking for",
        ),
        (
            "echo 'This account is currently not available.'; exit 1",
            "far",
            "far: distrain's process there has ended: exit code 1: distrain needs only a login shell and a Python",
            "This account is currently not available.",
        ),
    ],
    ids=["no interpreter", "no directory", "not reached", "no login shell"],
)
def test_what_a_host_lacks_is_named_with_the_cure(
    ssh: Callable[..., Path], fit_on: FitOn, tmp_path: Path, first: str, line: str, start: str, words: str
) -> None:
    ssh(first)
    text = failure(fit_on, tmp_path / "hosts", line)
    assert text.startswith(start)
    assert words in text


def test_a_host_without_the_script_is_named_with_all_places_where_it_was_looked_for(
    ssh: Callable[..., Path], storage: Path, tmp_path: Path
) -> None:
    ssh()
    (tmp_path / "own").mkdir()
    (tmp_path / "hosts").write_text(f"far cwd={tmp_path}/own\n")
    work = ScriptWork(path="train.py", launched_in="/launched/in", backend=BackendConfig())
    with pytest.raises(WorkerGroupError) as raised:
        run_work(work, ScalingConfig(hostfile=tmp_path / "hosts"), RunConfig(storage_path=storage))
    [first, *_] = str(raised.value).splitlines()
    assert first.startswith("rank 0 on far: ")
    assert f"this host has no file {tmp_path}/own/train.py and no file /launched/in/train.py; share it" in first


def test_an_interpreter_without_distrain_says_so(ssh: Callable[..., Path], fit_on: FitOn, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "python").symlink_to(os.path.realpath(sys.executable))
    ssh()
    shipping = ShippingConfig(enabled=False)
    text = failure(fit_on, tmp_path / "hosts", f"far python={tmp_path}/bare/python", shipping_config=shipping)
    assert text.startswith("far: distrain's process there has ended: exit code 1")
    assert "No module named 'distrain'" in text


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh", "tcsh", "fish"])
def test_any_login_shell_will_do(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    argv = ["env", "-u", "X", 'A=it\'s "a" $HOME', *process.bootstrap_argv("agent", "id", "sweep")]
    done = subprocess.run([shell, "-c", shlex.join(argv)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_host_that_does_not_have_our_checkout_takes_its_own_distrain(tmp_path: Path) -> None:
    ours = str(Path(distrain.__file__).parent)
    (tmp_path / "distrain").symlink_to(ours)
    argv = ["/nowhere/distrain" if word == ours else word for word in process.bootstrap_argv("agent", "id", "sweep")]
    assert "/nowhere/distrain" in argv
    subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True, timeout=60)

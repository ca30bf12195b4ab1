"""``python -m distrain.launch --check`` on this machine, and on "hosts" behind a program that replaces ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from distrain import ScalingConfig
from distrain.cli import preflight
from distrain.cli.preflight import Preflight
from distrain.coordinator.agent_link import AgentLink
from distrain.coordinator.transport import settings_for
from distrain.hosts.gpus import find_gpus
from tests.process.conftest import SSH_THAT_EXECUTES, make_fake_ssh

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Check = Callable[..., subprocess.CompletedProcess[str]]

SILENT_HOST = "exec sleep 60"
ENDS_AFTER_ITS_HELLO = 'for command; do :; done; : | sh -c "$command"; exit 255'
BROKEN_AGENT = r"printf '\000distrain\000'; yes nonsense | head -c 100000; exec sleep 60"


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Return a function that runs ``--check`` in ``tmp_path``. ``ssh``: the lines of the program of that name."""

    def run(*arguments: str, ssh: str = SSH_THAT_EXECUTES, columns: int = 200) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "ssh").write_text(f"#!/bin/sh\n{ssh}\n")
        (folder / "ssh").chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "COLUMNS": str(columns)}
        argv = [sys.executable, "-m", "distrain.launch", "--check", "--storage-path", "runs", *arguments]
        return subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    return run


def test_this_machine_is_checked_without_a_hostfile(check: Check, tmp_path: Path) -> None:
    done = check()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "this host can train"
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_table_is_as_wide_as_the_terminal(check: Check, columns: int) -> None:
    """Columns that do not fit continue in another table; nothing is cut off."""
    lines = check("--hosts", "one:1,two:1", columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    words = " ".join(line for line in lines if line.startswith("host ")).split()
    assert {"ssh", "python", "torch", "cloudpickle", "storage", "peers", "clock", "RAM", "disk", "GPUs"} <= set(words)
    assert words.count("host") in {40: range(5, 9), 80: range(2, 5), 200: (1,)}[columns]
    assert lines[-1] == "2 hosts can train together"


def test_hosts_that_are_one_machine_meet_on_its_loopback(check: Check) -> None:
    assert check("--hosts", "one:1,two:1").stdout.count("127.0.0.1 lo") == 2


def test_a_greeting_at_login_does_no_harm(check: Check) -> None:
    done = check("--hosts", "one:1", ssh=f"yes welcome | head -n 999\n{SSH_THAT_EXECUTES}")
    assert done.returncode == 0


def test_a_gpu_is_looked_for_if_it_is_asked_for(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check("--hosts", "one:1").returncode == 0
    done = check("--hosts", "one:1", "--use-gpu")
    assert done.returncode == 1
    assert "one: it has 0 usable GPUs for 1 workers; ask for fewer (--num-workers, or slots= in the" in done.stdout


def test_gpus_are_counted_for_as_many_workers_as_are_asked_for(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = check("--use-gpu", "--num-workers", "3")
    assert done.returncode == 1
    assert "localhost: it has 0 usable GPUs for 3 workers" in done.stdout


def test_gpus_that_only_workers_would_not_see_cannot_be_counted(check: Check) -> None:
    done = check("--use-gpu", "--env", "CUDA_VISIBLE_DEVICES=0")
    assert done.returncode == 1
    assert (
        "localhost: CUDA_VISIBLE_DEVICES=0 (from worker_runtime_env, --env or DISTRAIN_ENV) would hide" in done.stdout
    )


def test_a_gpu_that_the_hostfile_names_has_to_be_there(check: Check, tmp_path: Path) -> None:
    """No GPU has this name. Other problems of the host are reported, too."""
    (tmp_path / "hosts").write_text("one gpus=GPU-none cwd=/nowhere\ntwo\n")
    done = check("--hostfile", "hosts")
    assert done.returncode == 1
    assert "one: gpus=GPU-none in the hostfile, but " in done.stdout
    assert "one: no worker can run in /nowhere" in done.stdout


def test_gpus_that_nobody_can_count_are_a_warning_where_none_are_asked_for(check: Check, tmp_path: Path) -> None:
    if find_gpus(os.environ)[0]:
        pytest.skip("there are GPUs here")
    (tmp_path / "hosts").write_text("one gpus=0\n")
    done = check("--hostfile", "hosts")
    assert done.returncode == 0
    assert "! one: gpus=0 in the hostfile, but it has no GPU 0, or no NVIDIA driver" in done.stdout
    assert check("--hostfile", "hosts", "--use-gpu").returncode == 1


def test_too_few_slots_for_the_workers_are_told(check: Check) -> None:
    done = check("--hosts", "one:1,two:2", "--num-workers", "50")
    assert done.returncode == 1
    told = "this machine: num_workers is 50, but the hosts have only 3 slots: one 1, two 2. Ask for fewer workers, or"
    assert told in done.stdout
    assert done.stdout.splitlines()[-1] == "cannot train like this: this machine"
    assert check("--hosts", "one:1,two:2", "--num-workers", "2:50").returncode == 0
    assert check("--num-workers", "50").returncode == 0  # this machine without slots takes any number


def test_a_storage_that_cannot_be_used_is_told(check: Check, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    done = check()
    assert done.returncode == 1
    assert f"this machine: the storage {tmp_path}/runs cannot be used: " in done.stdout
    assert done.stdout.splitlines()[-1] == "cannot train like this: this machine"


def test_a_host_that_talks_nonsense_is_refused_and_left(check: Check) -> None:
    began = time.monotonic()
    done = check("--hosts", "one:1", ssh=BROKEN_AGENT)
    assert time.monotonic() - began < 20.0
    assert done.returncode == 1
    assert "one: " in done.stdout
    assert "protocol" in done.stdout


def test_a_connection_that_breaks_was_one(check: Check) -> None:
    """The cause is then not that ssh could not connect."""
    done = check("--hosts", "one:1", ssh=ENDS_AFTER_ITS_HELLO)
    assert done.returncode == 1
    assert "one: its agent has ended: exit code 255, which is ssh's when the connection breaks" in done.stdout


def test_a_missing_ssh_is_told(check: Check, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("one\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "distrain.launch", "--check", "--hostfile", "hosts", "--storage-path", "runs"],
        cwd=tmp_path, env={**os.environ, "PATH": str(empty)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "one: its agent cannot be started: [Errno 2] No such file or directory: 'ssh'" in done.stdout


def test_ctrl_c_ends_a_check_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n{SILENT_HOST}\n")
    (tmp_path / "ssh").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = [sys.executable, "-m", "distrain.launch", "--check", "--hosts", "one:1", "--storage-path", "runs"]
    with subprocess.Popen(argv, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as running:
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        running.send_signal(2)
        assert running.wait(timeout=4) == 130  # nobody is waited for who has not even answered
    assert list((tmp_path / "runs").iterdir()) == []


def test_ctrl_c_while_a_host_is_being_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(AgentLink):
        def __init__(self, *arguments: Any, **callbacks: Any) -> None:
            super().__init__(*arguments, **callbacks)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(preflight, "AgentLink", Interrupted)
    transport = make_fake_ssh(tmp_path, SILENT_HOST)
    settings = settings_for(transport, directory="/", sys_path=[], environment={}, own_environment={})
    check = Preflight(
        [transport],
        {transport.host.name: settings},
        storage_path=str(tmp_path / "runs"),
        sys_path=[],
        scaling=ScalingConfig(num_workers=1),
    )
    with pytest.raises(KeyboardInterrupt):
        check.run()
    assert not psutil.Process().children()


def test_a_hostfile_that_is_wrong_is_a_wrong_command_line(check: Check, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("one slots=none\n")
    done = check("--hostfile", "hosts")
    assert done.returncode == 2
    assert "hosts:1: slots=none" in done.stderr

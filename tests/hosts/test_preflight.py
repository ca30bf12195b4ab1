"""``python -m distrain.launch --check``: of this machine, of names behind a program named ssh, and of real hosts with
something wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from distrain import ScalingConfig
from distrain.cli.run import preflight
from distrain.cli.run.preflight import Preflight
from distrain.coordinator.connection.agent_link import AgentLink
from distrain.coordinator.connection.worker_settings import settings_for
from distrain.hosts.gpus import find_gpus
from distrain.system.version import __version__
from tests.conftest import wait_until
from tests.hosts.conftest import over
from tests.hosts.faults import blocked_pair, own_disk, python_with, site_of
from tests.hosts.lab import make_other_python
from tests.hosts.one_machine import EXECUTES
from tests.nvml import make_driver
from tests.process.conftest import make_fake_ssh

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hosts.one_machine import FakeSsh
    from tests.hosts.user import Ran, User

SILENT_HOST = "exec sleep 60"
ENDS_AFTER_ITS_HELLO = ': | sh -c "$command"; exit 255'
BROKEN_AGENT = r"printf '\000distrain\000'; yes nonsense | head -c 100000; exec sleep 60"


def finding(ran: Ran, host: str) -> str:
    """The one line about a host, and no other host has any."""
    [line] = [line for line in ran.out.splitlines() if line.startswith(("✗", "!"))]
    assert line.startswith((f"✗ {host}: ", f"! {host}: "))
    assert ran.code == (1 if line.startswith("✗") else 0)
    assert (f"cannot train like this: {host}" in ran.out) == line.startswith("✗")
    return line[len(host) + 4 :]


# -- the table -------------------------------------------------------------------------------------------------------


@over("this_machine")
def test_this_machine_is_checked_without_a_hostfile(user: User) -> None:
    ran = user.checks()
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[-1] == "this host can train"
    assert list((user.folder / "runs").iterdir()) == []


def test_three_hosts_that_are_well_are_shown_with_what_they_have(user: User) -> None:
    """One greets at login, one has another interpreter."""
    (user.folder / "hosts").write_text(user.lab.hostfile.read_text())
    ran = user.checks()
    assert (ran.code, ran.err) == (0, "")
    head, _, *rows, empty, verdict = ran.out.splitlines()
    assert head.split()[:8] == ["host", "reached", "python", "distrain", "torch", "cloudpickle", "cwd", "storage"]
    assert [row.split()[0] for row in rows] == ["this", "alpha", "beta:2222", "gamma"]
    for row, address in zip(rows[1:], ("10.77.0.11", "10.77.0.12", "10.77.0.13"), strict=True):
        words = row.split()
        assert words.count("ok") == 3
        assert words[words.index(address) + 1] == "eth0"
        assert __version__ in words
    assert (empty, verdict) == ("", "3 hosts can train together")
    assert list((user.folder / "runs").iterdir()) == []


@over("this_machine")
def test_gpus_that_are_ill_or_in_use_are_named(user: User, tmp_path: Path) -> None:
    """None of it keeps the host from training."""
    environment = {"LD_LIBRARY_PATH": str(make_driver(tmp_path / "driver")), "FAKE_GPUS": "gstsuf"}
    ran = user.checks(**environment, FAKE_USER=str(os.getpid()), CUDA_VISIBLE_DEVICES="0,1,2,3,4,5")
    *_, verdict = ran.out.splitlines()
    assert (ran.code, verdict) == (0, "this host can train")
    assert "6.0 of 8.0 GiB" in ran.out
    found = [line.removeprefix("! localhost: ") for line in ran.out.splitlines() if line.startswith("! ")]
    assert [text.partition(";")[0] for text in found] == [
        "GPU 1, 3: faulty memory, which is replaced when the GPU is reset: nvidia-smi --gpu-reset, or restart the host",
        "GPU 1, 3: 2 uncorrectable memory errors since the driver was loaded",
        "GPU 1, 3: slowed down by heat and the power supply (91 °C)",
        "GPU 2: 2.0 of 8.0 GiB are taken, by graphics or by a process that cannot be seen there",
        f"GPU 4: used by {psutil.Process().name()} (pid {os.getpid()})",
        "GPU 5: faulty memory, and no spare memory left to replace it",
    ]


@over("this_machine")
def test_workers_that_cannot_be_bound_are_found(user: User) -> None:
    workers = str(1 + len(os.sched_getaffinity(0)))
    ran = user.checks("--num-workers", workers, "--numa-binding", "exclusive")
    assert finding(ran, "localhost").startswith("numa_binding='exclusive': this host may use ")


@over("fake_ssh")
def test_an_interface_that_hosts_lack_is_found(user: User) -> None:
    """A single host needs none."""
    ran = user.checks("--hosts", "one:1,two:1", "--interface", "ib77")
    assert ran.code == 1
    assert "✗ one, two: it has no network interface ib77 that is up" in ran.out
    assert user.checks("--hosts", "one:1", "--interface", "ib77").code == 0


@pytest.mark.sample(1)
@over("fake_ssh")
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_table_is_as_wide_as_the_terminal(user: User, columns: int) -> None:
    """It goes on below where it does not fit; nothing is cut off."""
    lines = user.checks("--hosts", "one:1,two:1", COLUMNS=str(columns)).out.splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    words = " ".join(line for line in lines if line.startswith("host ")).split()
    assert {"reached", "python", "torch", "cloudpickle", "storage", "peers", "clock", "RAM", "disk", "GPUs"} <= set(
        words
    )
    assert words.count("host") in {40: range(5, 9), 80: range(2, 5), 200: (1,)}[columns]
    assert lines[-1] == "2 hosts can train together"


@pytest.mark.sample(1)
@over("fake_ssh", "one_sshd")
def test_hosts_that_are_one_machine_meet_on_its_loopback(user: User) -> None:
    (user.folder / "hosts").write_text(user.lab.hostfile.read_text())
    ran = user.checks()
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("127.0.0.1 lo") == 3
    assert ran.out.splitlines()[-1] == "3 hosts can train together"


@over("fake_ssh")
def test_a_greeting_at_login_does_no_harm(lab: FakeSsh, user: User) -> None:
    lab.make_ssh(f"yes welcome | head -n 999\n{EXECUTES}")
    assert user.checks("--hosts", "one:1").code == 0


# -- a host that cannot be reached -----------------------------------------------------------------------------------


def test_a_host_that_is_down_does_not_keep_the_others_from_being_looked_at(user: User) -> None:
    began = time.monotonic()
    ran = user.checks("--hosts", "alpha:1,10.77.0.99:1,beta:1")
    assert time.monotonic() - began < 20.0
    text = finding(ran, "10.77.0.99")
    assert text.startswith("ssh does not get there: ssh: connect to host 10.77.0.99 port 22: No route to host; ")
    assert text.endswith("-- 10.77.0.99 true")
    assert ran.out.count("eth0") == 2


def test_a_host_that_is_not_ours_to_log_in_is_named(user: User) -> None:
    ran = user.checks("--hosts", "alpha:1", "--ssh-args=-o PubkeyAuthentication=no")
    assert "Permission denied (publickey)" in finding(ran, "alpha")


@over("fake_ssh")
def test_a_host_that_talks_nonsense_is_refused_and_left(lab: FakeSsh, user: User) -> None:
    lab.make_ssh(BROKEN_AGENT)
    began = time.monotonic()
    ran = user.checks("--hosts", "one:1")
    assert time.monotonic() - began < 20.0
    assert "protocol" in finding(ran, "one")


@over("fake_ssh")
def test_a_connection_that_breaks_was_one(lab: FakeSsh, user: User) -> None:
    """Then it is not that ssh could not connect."""
    lab.make_ssh(ENDS_AFTER_ITS_HELLO)
    text = finding(user.checks("--hosts", "one:1"), "one")
    assert text.startswith("its agent has ended: exit code 255, which is ssh's when the connection breaks")


@over("fake_ssh")
def test_a_missing_ssh_is_told(user: User) -> None:
    empty = user.folder / "empty"
    empty.mkdir()
    text = finding(user.checks("--hosts", "one:1", PATH=str(empty)), "one")
    assert text.startswith("its agent cannot be started: [Errno 2] No such file or directory: 'ssh'")


# -- a host that lacks something -------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@over("fake_ssh", "namespaces")
def test_a_python_that_is_not_there_is_named(user: User) -> None:
    (user.folder / "hosts").write_text("alpha\nbeta python=/nowhere/python\n")
    text = finding(user.checks(), "beta")
    assert text.startswith("/nowhere/python does not start distrain there, exit code 127: ")
    assert text.endswith("or name another interpreter: python= in the hostfile")


@pytest.mark.sample(1)
@over("fake_ssh", "namespaces")
def test_a_python_without_distrain_is_named_and_a_greeting_is_not_its_words(user: User) -> None:
    python = make_other_python(user.folder / "bare")
    shutil.rmtree(site_of(user.folder / "bare") / "distrain")
    (site_of(user.folder / "bare") / "ours.pth").unlink()
    (user.folder / "hosts").write_text(f"alpha python='{python}'\nbeta\n")
    text = finding(user.checks("--no-ship"), "alpha")
    assert f"exit code 1: ModuleNotFoundError: No module named 'distrain'; install distrain=={__version__}" in text
    assert f"✗ alpha: its {python} has no torch; install there: torch==" in user.checks().out


@pytest.mark.sample(1)
@over("fake_ssh", "namespaces")
def test_another_python_is_told_by_its_version(user: User) -> None:
    other = python_with(user.folder / "other", "import platform\nplatform.python_version = lambda: '3.9.1'\n")
    (user.folder / "hosts").write_text(f"alpha\nbeta {other}\n")
    ran = user.checks()
    assert finding(ran, "beta").startswith("it has Python 3.9.1, this machine 3.")
    assert "✗ 3.9.1" in ran.out


@pytest.mark.sample(1)
@over("fake_ssh", "namespaces")
def test_another_distrain_is_named_with_the_command_that_fixes_it(user: User) -> None:
    other = python_with(user.folder / "other", "")
    version = site_of(user.folder / "other") / "distrain" / "system" / "version.py"
    version.write_text(version.read_text().replace(__version__, "9.9.9"))
    (user.folder / "hosts").write_text(f"alpha\nbeta {other}\n")
    text = finding(user.checks("--no-ship"), "beta")
    assert text == (
        f"it has distrain 9.9.9, this machine {__version__}; run there: pip install distrain=={__version__}"
    )


@pytest.mark.sample(2)
@over("fake_ssh", "namespaces")
@pytest.mark.parametrize(("package", "version", "mark"), [("torch", "2.0.0", "!"), ("cloudpickle", "1.0.0", "✗")])
def test_other_packages_are_told_by_their_version(user: User, package: str, version: str, mark: str) -> None:
    other = python_with(user.folder / "other", "")
    installed = site_of(user.folder / "other") / f"{package}-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    (user.folder / "hosts").write_text(f"alpha\nbeta {other}\n")
    ran = user.checks()
    assert finding(ran, "beta").startswith(f"it has {package} {version}, this machine ")
    assert f"{mark} {version}" in ran.out


@over("fake_ssh", "namespaces")
def test_a_directory_that_is_missing_is_named(user: User) -> None:
    (user.folder / "hosts").write_text("alpha cwd=/nowhere\nbeta\n")
    text = finding(user.checks(), "alpha")
    assert text.startswith("no worker can run in /nowhere: No such file or directory; create it, or set cwd=")


def test_a_storage_that_is_not_shared_is_found_although_the_path_exists(user: User) -> None:
    with own_disk(user.lab, "beta", user.folder / "runs"):
        ran = user.checks("--hosts", "alpha:1,beta:1")
    text = finding(ran, "beta")
    assert text.startswith(
        f"the storage {user.folder}/runs is another one than the launching machine's: its checkpoints"
    )
    assert ran.code == 0


def test_a_pair_that_is_blocked_is_named_both_ways(user: User) -> None:
    with blocked_pair(user.lab):
        ran = user.checks("--hosts", "alpha:1,beta:1,localhost:1")
    assert ran.code == 1
    alpha, beta, verdict = ran.out.splitlines()[-3:]
    assert alpha.startswith("✗ alpha: beta cannot connect to it at 10.77.0.11 (eth0): no answer within 4 s; let TCP")
    assert beta.startswith("✗ beta: alpha cannot connect to it at 10.77.0.12 (eth0): no answer within 4 s; let TCP")
    assert verdict == "cannot train like this: alpha, beta"


@over("fake_ssh", "namespaces")
def test_a_clock_that_is_wrong_is_a_warning(user: User) -> None:
    wrong = "import time\nreal = time.time\ntime.time = lambda: real() - 100.0\n"
    (user.folder / "hosts").write_text(f"alpha\nbeta {python_with(user.folder / 'other', wrong)}\n")
    ran = user.checks()
    assert finding(ran, "beta").startswith("its clock is 100.0 s behind this machine's")
    assert "! -100.0 s" in ran.out


# -- GPUs, slots and this machine ------------------------------------------------------------------------------------


@over("fake_ssh")
def test_a_gpu_is_looked_for_if_it_is_asked_for(lab: FakeSsh, user: User) -> None:
    lab.make_ssh(EXECUTES.replace("env -i", "env -i CUDA_VISIBLE_DEVICES="))
    assert user.checks("--hosts", "one:1").code == 0
    ran = user.checks("--hosts", "one:1", "--use-gpu")
    assert ran.code == 1
    assert "one: it has 0 usable GPUs for 1 workers; ask for fewer (--num-workers, or slots= in the" in ran.out


@over("this_machine")
def test_gpus_are_counted_for_as_many_workers_as_are_asked_for(user: User) -> None:
    ran = user.checks("--use-gpu", "--num-workers", "3", CUDA_VISIBLE_DEVICES="")
    assert ran.code == 1
    assert "localhost: it has 0 usable GPUs for 3 workers" in ran.out


@over("this_machine")
def test_gpus_that_only_workers_would_not_see_cannot_be_counted(user: User) -> None:
    ran = user.checks("--use-gpu", "--env", "CUDA_VISIBLE_DEVICES=0")
    assert ran.code == 1
    assert "localhost: CUDA_VISIBLE_DEVICES=0 (from worker_runtime_env, --env or DISTRAIN_ENV) would hide" in ran.out


@over("fake_ssh")
def test_a_gpu_that_the_hostfile_names_has_to_be_there(user: User) -> None:
    """None has this name. What else is wrong with the host is told, too."""
    (user.folder / "hosts").write_text("one gpus=GPU-none cwd=/nowhere\ntwo\n")
    ran = user.checks()
    assert ran.code == 1
    assert "one: gpus=GPU-none in the hostfile, but " in ran.out
    assert "one: no worker can run in /nowhere" in ran.out


@over("fake_ssh")
def test_gpus_that_nobody_can_count_are_a_warning_where_none_are_asked_for(user: User) -> None:
    if find_gpus(os.environ)[0]:
        pytest.skip("there are GPUs here")
    (user.folder / "hosts").write_text("one gpus=0\n")
    ran = user.checks()
    assert ran.code == 0
    assert "! one: gpus=0 in the hostfile, but it has no GPU 0, or no NVIDIA driver" in ran.out
    assert user.checks("--use-gpu").code == 1


@over("fake_ssh")
def test_too_few_slots_for_the_workers_are_told(user: User) -> None:
    ran = user.checks("--hosts", "one:1,two:2", "--num-workers", "50")
    assert ran.code == 1
    told = "this machine: --num-workers is 50, but the hosts have only 3 slots: one 1, two 2. Ask for fewer workers, or"
    assert told in ran.out
    assert ran.out.splitlines()[-1] == "cannot train like this: this machine"
    assert user.checks("--hosts", "one:1,two:2", "--num-workers", "2:50").code == 0
    assert user.checks("--num-workers", "50").code == 0  # this machine without slots takes any number


@over("this_machine")
def test_a_storage_that_cannot_be_used_is_told(user: User) -> None:
    (user.folder / "runs").write_text("a file")
    text = finding(user.checks(), "this machine")
    assert text.startswith(f"the storage {user.folder}/runs cannot be used: ")


@over("this_machine")
def test_a_hostfile_that_is_wrong_is_a_wrong_command_line(user: User) -> None:
    (user.folder / "hosts").write_text("one slots=none\n")
    ran = user.checks()
    assert ran.code == 2
    assert "hosts:1: slots=none" in ran.err


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


@over("fake_ssh")
def test_ctrl_c_ends_a_check_and_leaves_nothing(lab: FakeSsh, user: User) -> None:
    lab.make_ssh(f"touch {user.folder}/started\n{SILENT_HOST}")
    argv = [sys.executable, "-m", "distrain.launch", "--check", "--hosts", "one:1", "--storage-path", "runs"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=user.folder, env=lab.environment(), stdout=pipe) as running:
        wait_until((user.folder / "started").exists, what="ssh")
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=4) == 130  # nobody is waited for who has not even answered
    assert list((user.folder / "runs").iterdir()) == []


def test_ctrl_c_while_a_host_is_being_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(AgentLink):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(preflight, "AgentLink", Interrupted)
    transport = make_fake_ssh(tmp_path, SILENT_HOST)
    settings = settings_for([transport], directory="/", sys_path=[], environment={}, own_environment={})
    check = Preflight(
        [transport],
        settings,
        storage_path=str(tmp_path / "runs"),
        sys_path=[],
        scaling=ScalingConfig(num_workers=1),
    )
    before = psutil.Process().children()  # the hosts of other tests
    with pytest.raises(KeyboardInterrupt):
        check.run()
    assert psutil.Process().children() == before

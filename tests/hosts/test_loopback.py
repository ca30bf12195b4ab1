"""Training over one real sshd, which an ordinary user runs on 127.0.0.1 for himself, with three names in his ssh's
configuration for three hosts: where there is neither root nor a namespace to be had, and nothing that only root can.

As they share their network, ranks meet on the loopback interface. If the tests run as root, the user is another one.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from distrain.hosts.ports import reserve_port
from tests.conftest import wait_until
from tests.hosts import test_crash_table
from tests.hosts.conftest import HOSTS, ROOT, Hosts
from tests.hosts.test_crash_table import BLOWS, start
from tests.hosts.test_preflight import check
from tests.hosts.test_training import (
    test_no_value_is_in_the_arguments_of_any_process,
    test_torch_trains_over_three_hosts_with_different_slots,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.hosts.running import Running
    from tests.hosts.user import User

__all__ = [
    "start",
    "test_no_value_is_in_the_arguments_of_any_process",
    "test_torch_trains_over_three_hosts_with_different_slots",
]
"""From the tests of the lab, to run here, too."""

ORDINARY, UID = "trainer", 65533
NEEDED = {"ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server", "setpriv": "util-linux"}
SSHD_CONFIG = """\
ListenAddress 127.0.0.1
Port {port}
HostKey "{folder}/hostkey"
PidFile none
AuthorizedKeysFile "{folder}/id.pub"
AcceptEnv PLACE
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
MaxSessions 64
MaxStartups 100
"""
SSH_CONFIG = """\
Host *
  HostName 127.0.0.1
  Port {port}
  IdentityFile "{folder}/id"
  IdentitiesOnly yes
  UserKnownHostsFile "{folder}/known_hosts"
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


@dataclass(frozen=True, kw_only=True)
class Loopback(Hosts):
    """``become`` is what comes before a command of the user's; ``why_root``: why that is nothing although the tests run
    as root. On a host, PLACE is its name."""

    become: list[str]
    why_root: str = ""

    @property
    def network(self) -> tuple[str, str, None]:
        return "127.0.0.1", "lo", None

    def argv(self, host: str, *argv: str) -> list[str]:
        assert host == "head"
        return [*self.become, *argv]

    def line(self, host: str) -> str:
        return host

    def has(self, host: str, member: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return bool(member.environ().get("PLACE") == host)
        return False

    def folder_for(self, folder: Path) -> Path:
        own = self.folder / "work" / folder.name
        own.mkdir(parents=True)
        own.chmod(0o777)
        return own

    def environment(self, **more: str) -> dict[str, str]:
        own = {"HOME": str(self.folder), "DISTRAIN_SSH_ARGS": f"-F '{self.folder}/ssh_config'"}
        return super().environment(**own, **more)


@pytest.fixture(scope="module")
def lab() -> Iterator[Loopback]:
    """In place of the lab of namespaces."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [f"{name} (package {package})" for name, package in NEEDED.items() if not shutil.which(name, path=path)]
    if missing:
        pytest.skip(f"missing here: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="distrain-loopback-", ignore_cleanup_errors=True) as made:
        folder = Path(made, "with space")
        folder.mkdir()
        loopback = Loopback(folder=folder, **(ordinary_user(folder) if os.geteuid() == 0 else {"become": []}))
        with sshd(loopback, str(shutil.which("sshd", path=path))):
            done = loopback.run("head", "ssh", "-F", str(folder / "ssh_config"), "alpha", "true")
            if done.returncode:
                pytest.skip(f"one cannot log in here: {done.stderr.strip()}")
            slots = "".join(f"{name} slots={number}\n" for name, number in HOSTS.items())
            loopback.hostfile.write_text(slots)
            yield loopback


def ordinary_user(folder: Path) -> dict[str, Any]:
    """How root becomes one to whom ``folder`` belongs: he gets a name, and sees the interpreter, by mounts of his own;
    where there can be none, root stays root."""
    for path in (folder.parent, folder):
        os.chown(path, UID, UID)
    passwd = f"{Path('/etc/passwd').read_text()}{ORDINARY}:x:{UID}:{UID}::{folder}:/bin/sh\n"
    (folder / "passwd").write_text(passwd)
    (folder / "under").mkdir()
    mounts = [["mount", "--bind", str(folder / "passwd"), "/etc/passwd"], *to_show(folder / "under")]
    script = " && ".join([*map(shlex.join, mounts), 'exec "$@"'])
    become = ["unshare", "--mount", "sh", "-c", script, "sh"]
    # Without env, the interpreter itself would still be found with root's rights, and then not its library.
    become += ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env"]
    probe = "import os, sys, cloudpickle, distrain; assert sys.base_prefix == sys.argv[1]; os.mkdir(sys.argv[2])"
    done = subprocess.run(
        [*become, sys.executable, "-c", probe, sys.base_prefix, str(folder / "work")],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return {"become": become}
    for path in (folder.parent, folder):
        os.chown(path, 0, 0)
    return {"become": [], "why_root": done.stderr.strip().rpartition("\n")[2]}


def to_show(under: Path) -> list[list[str]]:
    """Commands that mount what he needs where he cannot get at it, and nothing beside it: a Python in /root."""
    needed = {Path(path) for path in (sys.base_prefix, sys.prefix, os.path.realpath(sys.executable), ROOT)}
    closed: dict[Path, list[Path]] = {}
    for path in sorted({path if path.is_dir() else path.parent for path in needed}):
        above = [parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001]
        if above and not any(path.is_relative_to(shown) for shown in closed.get(above[0], [])):
            closed.setdefault(above[0], []).append(path)
    commands = []
    for folder, paths in closed.items():
        commands += [["mount", "--rbind", str(folder), str(under)]]
        commands += [["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(folder)]]
        for path in paths:
            commands += [["mkdir", "-p", str(path)]]
            commands += [["mount", "--rbind", str(under / path.relative_to(folder)), str(path)]]
        commands += [["umount", "--lazy", str(under)]]
    return commands


@contextlib.contextmanager
def what_an_sshd_of_root_needs(folder: Path = Path("/run/sshd")) -> Iterator[None]:
    """Which a service would make."""
    is_there = folder.exists()
    folder.mkdir(exist_ok=True)
    yield
    if not is_there:
        folder.rmdir()


@contextlib.contextmanager
def sshd(loopback: Loopback, program: str) -> Iterator[None]:
    """It listens, and ends with this process at the latest."""
    folder = loopback.folder
    with reserve_port() as reserved, what_an_sshd_of_root_needs() if loopback.why_root else contextlib.nullcontext():
        port = reserved.getsockname()[1]
        for name in ("id", "hostkey"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            assert loopback.run("head", *argv).returncode == 0
        (folder / "known_hosts").write_text(f"* {(folder / 'hostkey.pub').read_text()}")
        (folder / "sshd_config").write_text(SSHD_CONFIG.format(port=port, folder=folder))
        places = "".join(f"Host {name}\n  SetEnv PLACE={name}\n" for name in HOSTS)
        (folder / "ssh_config").write_text(SSH_CONFIG.format(port=port, folder=folder) + places)
        argv = loopback.argv(
            "head", "setpriv", "--pdeathsig=KILL", program, "-D", "-e", "-f", str(folder / "sshd_config")
        )
        with (folder / "log").open("wb") as log:
            running = subprocess.Popen(argv, cwd="/", env={"PATH": "/usr/bin:/bin"}, stderr=log)
        try:
            wait_until(lambda: running.poll() is not None or answers(port), what="sshd")
            if running.poll() is not None:
                pytest.skip(f"sshd does not run here: {(folder / 'log').read_text().strip()}")
            yield
        finally:
            running.kill()
            running.wait()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def test_nobody_is_root_here(lab: Loopback) -> None:
    if lab.why_root:
        pytest.skip(f"no ordinary user can be had here: {lab.why_root}")
    done = lab.run("head", "ssh", "-F", str(lab.folder / "ssh_config"), "gamma", "id -u; echo $PLACE")
    assert done.stdout.splitlines() == [str(UID if lab.become else os.getuid()), "gamma"]


def test_a_rank_that_fails_is_named_with_its_host(user: User) -> None:
    train = "def train():\n    if os.environ['RANK'] == '2':\n        raise ValueError('of beta')\n"
    ran = user.trains(train, "num_workers=6, hostfile=hostfile")
    assert ran.code == 1
    assert "rank 2 on beta" in ran.err
    assert "ValueError: of beta" in ran.err


@pytest.mark.parametrize("blow", ["kill -9 sshd", "kill -9 agent"])
def test_a_host_that_is_lost_leaves_the_others_of_its_machine_alone(blow: str, start: Callable[..., Running]) -> None:
    """What is left of it is ended, by its own agent or at the end of the run, and nothing else."""
    running = start(max_failures=1)
    BLOWS[blow].strike(running, "beta")
    output, _ = running.end()
    assert "distrain: rank 1 on beta was lost: its agent has ended" in output
    assert "distrain: trying to reach gamma\n" in output  # and not alpha
    assert "distrain: 2 workers on alpha, gamma, without beta\n" in output
    assert output.splitlines()[-1] == "FINISHED 1"


def test_nothing_is_left_when_the_users_process_is_killed(start: Callable[..., Running]) -> None:
    test_crash_table.test_nothing_is_left_on_any_host_when_the_users_process_is_killed(start, "beta")


def test_all_names_of_a_machine_can_train_together(user: User) -> None:
    (user.folder / "hosts").write_text(user.lab.hostfile.read_text())
    ran = check(user)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("127.0.0.1 lo") == 3
    assert ran.out.splitlines()[-1] == "3 hosts can train together"

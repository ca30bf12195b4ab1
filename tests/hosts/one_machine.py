"""Hosts that are one machine; they need neither root nor namespaces.

``ThisMachine`` is "localhost" without ssh. ``FakeSsh`` has names behind a program named ssh. ``Loopback`` has names
behind one real sshd, which an ordinary user runs on 127.0.0.1; if the tests run as root, they become another user. All
these hosts share a network, so ranks meet on the loopback interface.
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
from distrain.system import process
from tests.conftest import run_members, wait_until
from tests.hosts.lab import HOSTS, ROOT, Hosts
from tests.strangers import Listener, listeners

if TYPE_CHECKING:
    from collections.abc import Iterator

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
MaxStartups {startups}
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
class OneMachine(Hosts):
    """Hosts that share one network. On each, the environment variable PLACE is its name."""

    @property
    def network(self) -> tuple[str, str, None]:
        return "127.0.0.1", "lo", None

    def argv(self, host: str, *argv: str) -> list[str]:
        return list(argv)

    def addresses(self, host: str) -> tuple[str, ...]:
        return ("127.0.0.1",)

    def line(self, host: str) -> str:
        return host

    def has(self, host: str, member: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return bool(member.environ().get("PLACE") == host)
        return False

    def write_hostfile(self) -> None:
        self.hostfile.write_text("".join(f"{name} slots={number}\n" for name, number in self.slots.items()))


@dataclass(frozen=True, kw_only=True)
class ThisMachine(OneMachine):
    @property
    def slots(self) -> dict[str, int]:
        return {"localhost": 2}

    def environment(self, **more: str) -> dict[str, str]:
        return super().environment(PLACE="localhost", **more)

    def listeners(self, host: str) -> list[Listener]:
        ours = {member.pid for member in run_members(os.environ[process.RUN_IDS])}
        return [listener for listener in listeners() if listener.pid in ours]


FAKE_SSH = """\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
host=$2 command=$3
[ "$host" != alpha ] || echo "Welcome to alpha"
{body}
"""
EXECUTES = 'cd / && env -i PLACE="$host" PATH=/usr/bin:/bin sh -c "$command"'
"""Run the command in another directory and without this machine's environment, as the real ssh would."""


@dataclass(frozen=True, kw_only=True)
class FakeSsh(OneMachine):
    """The user's PATH begins with a folder that has a program named ssh. ``alpha`` greets at login."""

    def make_ssh(self, body: str = EXECUTES) -> None:
        """Write the program. ``body``: shell code that handles ``$command`` for ``$host``."""
        program = self.folder / "bin" / "ssh"
        program.parent.mkdir(exist_ok=True)
        program.write_text(FAKE_SSH.format(body=body))
        program.chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        return super().environment(**{"PATH": f"{self.folder}/bin:{os.environ['PATH']}", **more})


@dataclass(frozen=True, kw_only=True)
class Loopback(OneMachine):
    """``become`` is the start of every command line of the user. ``why_root`` is the reason if that is empty although
    the tests run as root."""

    become: list[str]
    why_root: str = ""

    def argv(self, host: str, *argv: str) -> list[str]:
        assert host == "head"
        return [*self.become, *argv]

    def folder_for(self, folder: Path) -> Path:
        own = self.folder / "work" / folder.name
        own.mkdir(parents=True)
        own.chmod(0o777)
        return own

    def environment(self, **more: str) -> dict[str, str]:
        own = {"HOME": str(self.folder), "DISTRAIN_SSH_ARGS": f"-F '{self.folder}/ssh_config'"}
        return super().environment(**own, **more)


@contextlib.contextmanager
def start_loopback(startups: str = "100") -> Iterator[Loopback]:
    """Start the sshd. Skip the test where none can run, or nobody can log in.

    startups: how many may log in at the same time, as MaxStartups has it.
    """
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [f"{name} (package {package})" for name, package in NEEDED.items() if not shutil.which(name, path=path)]
    if missing:
        pytest.skip(f"missing here: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="distrain-loopback-", ignore_cleanup_errors=True) as made:
        folder = Path(made, "with space")
        folder.mkdir()
        loopback = Loopback(folder=folder, **(ordinary_user(folder) if os.geteuid() == 0 else {"become": []}))
        with sshd(loopback, str(shutil.which("sshd", path=path)), startups):
            done = loopback.run("head", "ssh", "-F", str(folder / "ssh_config"), "alpha", "true")
            if done.returncode:
                pytest.skip(f"one cannot log in here: {done.stderr.strip()}")
            loopback.write_hostfile()
            yield loopback


def ordinary_user(folder: Path) -> dict[str, Any]:
    """Return how root becomes an ordinary user who owns ``folder``. Mounts give the user a name and show the
    interpreter. Where mounts are impossible, root stays root."""
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
    """Return commands that show the user, of closed folders, only what a training needs, such as a Python in /root."""
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
    """Make the folder that the service would make."""
    is_there = folder.exists()
    folder.mkdir(exist_ok=True)
    yield
    if not is_there:
        folder.rmdir()


@contextlib.contextmanager
def sshd(loopback: Loopback, program: str, startups: str) -> Iterator[None]:
    """Run the sshd; it ends with this process at the latest."""
    folder = loopback.folder
    with reserve_port() as reserved, what_an_sshd_of_root_needs() if loopback.why_root else contextlib.nullcontext():
        port = reserved.getsockname()[1]
        for name in ("id", "hostkey"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            assert loopback.run("head", *argv).returncode == 0
        (folder / "known_hosts").write_text(f"* {(folder / 'hostkey.pub').read_text()}")
        (folder / "sshd_config").write_text(SSHD_CONFIG.format(port=port, folder=folder, startups=startups))
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

"""Hosts to train on. ``Hosts`` is any kind; a ``Lab`` has hosts with a network, processes and an sshd of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distrain
from distrain.system import process
from tests.conftest import wait_until
from tests.strangers import Listener

if TYPE_CHECKING:
    import psutil

ROOT = Path(distrain.__file__).resolve().parent.parent
NETLAB = ROOT / "scripts" / "netlab"
HOSTS = {"alpha": 2, "beta": 1, "gamma": 3}
ADDRESSES = {name: (f"10.77.0.{number}", f"fd77::{number}") for number, name in enumerate(HOSTS, start=11)}
SSH_PORTS = {22, 2222}
MISSING_EXIT = 3


@dataclass(frozen=True, kw_only=True)
class Hosts(ABC):
    """Hosts that can be reached from ``head``."""

    folder: Path
    other_python: Path = Path(sys.executable)
    """An interpreter that all hosts have."""

    @property
    def hostfile(self) -> Path:
        return self.folder / "hostfile"

    @abstractmethod
    def argv(self, host: str, *argv: str) -> list[str]:
        """Return the command line that runs ``argv`` on a host."""

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of the user in ``head``."""
        return {**os.environ, "PYTHONPATH": str(ROOT), **more}

    def run(
        self, host: str, *argv: str, cwd: Path | None = None, timeout_s: float = 90.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(host, *argv),
            cwd=cwd,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class Lab(Hosts):
    """A running lab. ``alpha`` greets at login. ``gamma`` has neither the interpreter nor the checkout of this machine,
    but an interpreter of its own, which the hostfile names."""

    @property
    def places(self) -> list[list[Any]]:
        """The result of ``place()`` (tests/hosts/user.py) in each rank, if every slot has a rank."""
        size, places = sum(HOSTS.values()), []
        for node, (host, slots) in enumerate(HOSTS.items()):
            places += [[host, len(places) + local, local, node, slots, size] for local in range(slots)]
        return places

    def argv(self, host: str, *argv: str) -> list[str]:
        """See :class:`Hosts`; ``host`` may also be the ``switch``."""
        return [sys.executable, str(NETLAB), "--dir", str(self.folder), "exec", host, *argv]

    def listeners(self, host: str) -> list[Listener]:
        """Return the listeners that the host itself sees, except sshd."""
        done = self.run(host, str(self.other_python), "-m", "tests.strangers", "listeners", cwd=self.folder)
        assert done.returncode == 0, done.stderr
        found = [Listener(**fields) for fields in json.loads(done.stdout)]
        assert {listener.port for listener in found} >= (SSH_PORTS if host != "head" else set()), "it can see"
        return [listener for listener in found if listener.port not in SSH_PORTS]

    def line(self, host: str) -> str:
        """Return the line of the host in a hostfile."""
        return f"gamma python='{self.other_python}'" if host == "gamma" else host

    def has(self, host: str, member: psutil.Process) -> bool:
        """Tell whether a process is on a host."""
        init = json.loads((self.folder / "pids.json").read_text())[host][0]
        try:
            return os.readlink(f"/proc/{member.pid}/ns/pid") == os.readlink(f"/proc/{init}/ns/pid")
        except OSError:
            return False


def start_lab(folder: Path, *hosts: str) -> subprocess.Popen[bytes]:
    """Start a lab as a process that takes it down when its stdin ends. Skip the test where no lab can run.

    It does not have the id of the test, whose census would end it.
    """
    argv = [sys.executable, str(NETLAB), "--dir", str(folder), "hold", *hosts]
    environment = {name: value for name, value in os.environ.items() if name != process.RUN_IDS}
    pipe = subprocess.PIPE
    holder = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != b"ready\n":
        said = holder.communicate(timeout=20)[1].decode()
        if holder.returncode == MISSING_EXIT:
            pytest.skip(said.strip())
        raise AssertionError(said)
    return holder


def members(folder: Path) -> list[int]:
    """Return the pids of those first processes of a lab's hosts that still live."""
    found = []
    for pid, began in json.loads((folder / "pids.json").read_text()).values():
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[18]) == began and state != "Z":
            found.append(pid)
    return found


def end_lab(holder: subprocess.Popen[bytes], folder: Path) -> None:
    assert holder.stdin is not None
    holder.stdin.close()
    holder.wait(timeout=20)
    for pipe in (holder.stdout, holder.stderr):
        assert pipe is not None
        pipe.close()
    wait_until(lambda: not members(folder), what="the end of all hosts")


def make_other_python(folder: Path) -> Path:
    """Make an interpreter at another path, with a copy of distrain and the libraries of this interpreter."""
    libraries = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    base = Path(os.path.realpath(sys.executable))
    libraries.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    shutil.copytree(ROOT / "distrain", libraries / "distrain", ignore=shutil.ignore_patterns("__pycache__"))
    (libraries / "ours.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
    return folder / "bin" / "python"

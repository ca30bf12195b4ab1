"""Three hosts on this machine, each with a network, processes and an sshd of its own, and commands run among them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import distrain
from tests.conftest import wait_until
from tests.hosts.user import User

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

ROOT = Path(distrain.__file__).resolve().parent.parent
NETLAB = ROOT / "scripts" / "netlab"
HOSTS = {"alpha": 2, "beta": 1, "gamma": 3}
MISSING_EXIT = 3


@dataclass(frozen=True, kw_only=True)
class Hosts(ABC):
    """Hosts that can be reached by ssh from ``head``, by the names in :data:`HOSTS`."""

    folder: Path

    @property
    def hostfile(self) -> Path:
        return self.folder / "hostfile"

    @property
    @abstractmethod
    def network(self) -> tuple[str, str, str | None]:
        """Where ranks on several of them meet, and the interface, as gloo and NCCL are told."""

    @abstractmethod
    def argv(self, host: str, *argv: str) -> list[str]:
        """The command line that runs ``argv`` on a host."""

    @abstractmethod
    def line(self, host: str) -> str:
        """Names the host in a hostfile."""

    @abstractmethod
    def has(self, host: str, member: psutil.Process) -> bool:
        """Whether a process of a run is on a host."""

    def folder_for(self, folder: Path) -> Path:
        """Where the user in ``head`` may write: ``folder``, or another one for it."""
        return folder

    def environment(self, **more: str) -> dict[str, str]:
        """Of the user in ``head``."""
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
    """A lab that is up. ``alpha`` greets at login, ``gamma`` has neither our interpreter nor our checkout, but an
    interpreter of its own, which the hostfile names."""

    other_python: Path

    @property
    def network(self) -> tuple[str, str, str]:
        return "10.77.0.11", "eth0", "=eth0"

    def argv(self, host: str, *argv: str) -> list[str]:
        """On the ``switch``, too."""
        return [sys.executable, str(NETLAB), "--dir", str(self.folder), "exec", host, *argv]

    def line(self, host: str) -> str:
        return f"gamma python='{self.other_python}'" if host == "gamma" else host

    def has(self, host: str, member: psutil.Process) -> bool:
        init = json.loads((self.folder / "pids.json").read_text())[host][0]
        try:
            return os.readlink(f"/proc/{member.pid}/ns/pid") == os.readlink(f"/proc/{init}/ns/pid")
        except OSError:
            return False


def start_lab(folder: Path, *hosts: str) -> subprocess.Popen[bytes]:
    """A lab in the foreground of a process, which takes it down when its stdin ends. Skips where there can be none."""
    argv = [sys.executable, str(NETLAB), "--dir", str(folder), "hold", *hosts]
    holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != b"ready\n":
        said = holder.communicate(timeout=20)[1].decode()
        if holder.returncode == MISSING_EXIT:
            pytest.skip(said.strip())
        raise AssertionError(said)
    return holder


def members(folder: Path) -> list[int]:
    """Pids of the first processes of a lab's hosts that still live."""
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


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One for the tests of a module: what a test changes in it, it changes back."""
    folder = tmp_path_factory.mktemp("lab") / "with space"
    holder = start_lab(folder, *(f"{name}:{slots}" for name, slots in HOSTS.items()))
    try:
        lab = Lab(folder=folder, other_python=make_other_python(folder / "elsewhere"))
        (folder / "homes" / "alpha" / ".bashrc").write_text("echo 'Welcome to alpha'\n")
        own_python = [Path(sys.executable).parent] if sys.prefix != sys.base_prefix else []
        for hidden in (ROOT / "distrain", *own_python):
            subprocess.run(lab.argv("gamma", "mount", "-t", "tmpfs", "tmpfs", str(hidden)), check=True, cwd="/")
        lab.hostfile.write_text(
            f"# the lab\nalpha slots=2\n\nbeta:2222 slots=1\nroot@gamma slots=3 python='{lab.other_python}'\n"
        )
        yield lab
    finally:
        end_lab(holder, folder)


@pytest.fixture
def user(lab: Hosts, tmp_path: Path) -> User:
    return User(lab, lab.folder_for(tmp_path))


def make_other_python(folder: Path) -> Path:
    """An interpreter at another path, with a copy of distrain, and the libraries of this one."""
    libraries = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    base = Path(os.path.realpath(sys.executable))
    libraries.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    shutil.copytree(ROOT / "distrain", libraries / "distrain", ignore=shutil.ignore_patterns("__pycache__"))
    (libraries / "ours.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
    return folder / "bin" / "python"

"""Bare hosts: machines with sshd and a Python, which have no file of the user, no distrain and no storage.

Each has its own environment in ``~/python``, which is first in the PATH of commands over ssh. Its packages are links to
those of the interpreter of the tests, which the hosts see at another path. So an environment is made in milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import psutil

from tests.conftest import wait_until
from tests.hosts.lab import Lab, end_lab, start_lab

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
Lacking: TypeAlias = "tuple[str, ...] | None"
"""The packages that an environment lacks; None: all."""
ALL_PACKAGES: Lacking = ("distrain",)
"""The only package that an otherwise complete environment lacks: bare hosts never have distrain."""
NO_PACKAGES: Lacking = None
BARE_HOSTS: dict[str, Lacking] = {
    "alpha": ALL_PACKAGES,
    "beta": ("distrain", "cloudpickle", "psutil"),
    "gamma": NO_PACKAGES,
}
GONE_WITHIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class BareLab(Lab):
    """A running lab of bare hosts, with one slot each. lacks: by host, as BARE_HOSTS."""

    lacks: dict[str, Lacking]

    def line(self, host: str) -> str:
        return host

    def environment(self, **more: str) -> dict[str, str]:
        """See :class:`Hosts`. Without this checkout in PYTHONPATH, which would be a part of the user's project."""
        return {**super().environment(), "PYTHONPATH": "", **more}

    def home(self, host: str) -> Path:
        """Return the path of this machine at which the host's home directory lies."""
        return self.folder / "homes" / host

    def python(self, host: str) -> str:
        """Return the path of the environment's interpreter on the host."""
        return f"/home/{host}/python/bin/{PYTHON}"

    def over_ssh(self, host: str, command: str) -> subprocess.CompletedProcess[str]:
        """Run a shell command on a host, as the user in ``head`` does."""
        return self.run("head", "ssh", host, command, cwd=Path("/"))

    def strangers(self, host: str) -> list[psutil.Process]:
        """Return the processes of a host that it did not have at first, except sshd's."""
        first = json.loads((self.folder / "pids.json").read_text())[host][0]
        found = []
        for member in psutil.process_iter():
            if self.has(host, member):
                with contextlib.suppress(psutil.NoSuchProcess):
                    is_first = member.pid == first
                    found += [member] if not is_first and not member.name().startswith("sshd") else []
        return found

    def expect_nothing_left(self, host: str) -> None:
        """Wait for the end of all processes of runs on a host, and check that no file of a run is left there.

        Programs and files that later runs use again may stay in ``~/.cache/distrain``.
        """
        wait_until(lambda: not self.strangers(host), GONE_WITHIN_S, f"the end of all processes on {host}")
        done = self.over_ssh(host, "ls -A /tmp /var/tmp /dev/shm /root/.cache")
        names = [line for line in done.stdout.splitlines() if line and not line.endswith(":")]
        left = [name for name in names if not name.startswith("torchinductor")]  # torch's own cache
        assert left == [], done.stdout
        wait_until(lambda: not self.run_folders(host), GONE_WITHIN_S, f"the end of the run's directories on {host}")

    def run_folders(self, host: str) -> list[str]:
        """Return the directories in the host's cache that belong to one run each."""
        cache = self.home(host) / ".cache" / "distrain"
        return sorted(str(path.relative_to(cache)) for path in cache.glob("runs/*"))


@contextlib.contextmanager
def start_bare_lab(folder: Path, lacks: dict[str, Lacking]) -> Iterator[BareLab]:
    """Start a lab of bare hosts. What is beside ``folder`` is hidden from them, too."""
    mounts = [f"--mount={source}={target}" for source, target in package_folders().items()]
    holder = start_lab(folder, *mounts, *(f"{name}:1:bare" for name in lacks))
    try:
        lab = BareLab(folder=folder, other_python=Path(sys.executable).resolve(), lacks=lacks)
        for host, lacking in lacks.items():
            make_environment(lab.home(host) / "python", lacking)
            (lab.home(host) / ".bashrc").write_text(f"PATH=/home/{host}/python/bin:$PATH\n")
        yield lab
    finally:
        end_lab(holder, folder)


def package_folders() -> dict[str, str]:
    """Return the directories with the packages of this interpreter, each with its path on bare hosts."""
    sources = [path for path in sys.path if path.endswith("-packages")]
    return {source: f"/opt/packages/{number}" for number, source in enumerate(sources)}


def make_environment(folder: Path, lacking: Lacking) -> None:
    """Make a virtual environment with all packages but these; ``None``: with none at all."""
    base = Path(sys.executable).resolve()
    site = folder / "lib" / PYTHON / "site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    for name in ("python", "python3", PYTHON):
        (folder / "bin" / name).symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    if lacking is None:
        return
    for source, target in package_folders().items():
        for entry in os.listdir(source):
            package = entry.partition(".")[0].partition("-")[0]
            is_start_file = entry.endswith(".pth") or entry.startswith(("__editable__", "__pycache__"))
            if package not in lacking and not is_start_file and not os.path.lexists(site / entry):
                (site / entry).symlink_to(f"{target}/{entry}")

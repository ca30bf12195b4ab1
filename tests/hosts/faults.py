"""Peculiarities of hosts: another interpreter, a disk that is not shared, a blocked way to another host, a second
network."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING

from tests.hosts.lab import Lab, make_other_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def python_with(folder: Path, customized: str) -> str:
    """Make another interpreter with a copy of distrain; return how a hostfile names it. ``customized``: source to run
    at its start."""
    python = make_other_python(folder)
    (site_of(folder) / "ours_too.pth").write_text("import ours_too\n")
    (site_of(folder) / "ours_too.py").write_text(customized)
    return f"python={shlex.quote(str(python))}"


def site_of(folder: Path) -> Path:
    [site] = (folder / "lib").glob("python*/site-packages")
    return site


@contextlib.contextmanager
def own_disk(lab: Lab, host: str, folder: Path) -> Iterator[None]:
    """Mount an own disk at ``folder`` on this host."""
    folder.mkdir(exist_ok=True)
    assert lab.run(host, "mount", "-t", "tmpfs", "tmpfs", str(folder), cwd=lab.folder).returncode == 0
    try:
        yield
    finally:
        assert lab.run(host, "umount", str(folder), cwd=lab.folder).returncode == 0


@contextlib.contextmanager
def blocked_pair(lab: Lab) -> Iterator[None]:
    """Drop what alpha sends to beta without an error, as a firewall may do."""
    neighbour = ("ip", "neigh", "replace", "10.77.0.12", "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud")
    assert lab.run("alpha", *neighbour, "permanent").returncode == 0
    try:
        yield
    finally:
        assert lab.run("alpha", "ip", "neigh", "del", "10.77.0.12", "dev", "eth0").returncode == 0

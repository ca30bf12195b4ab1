"""Fixtures of hosts, of several kinds. The default is three hosts with a network, processes and an sshd of their own.

A test asks for the fixture ``lab``, or for ``user``, who sits in front of the hosts. ``over(...)`` chooses other kinds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hosts.lab import HOSTS, ROOT, Hosts, Lab, end_lab, make_other_python, start_lab
from tests.hosts.one_machine import FakeSsh, ThisMachine
from tests.hosts.user import User

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab for the tests of a module. A test undoes its changes to it."""
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
def fake_ssh(tmp_path: Path) -> Hosts:
    """Names behind a program named ssh that runs commands on this machine."""
    fake = FakeSsh(folder=tmp_path)
    fake.make_ssh()
    return fake


@pytest.fixture
def this_machine(tmp_path: Path) -> Hosts:
    """The host "localhost", without any ssh."""
    return ThisMachine(folder=tmp_path)


def over(*kinds: str) -> pytest.MarkDecorator:
    """Run a test once on each of these kinds of hosts, named by their fixtures."""
    return pytest.mark.parametrize("lab", kinds, indirect=True)


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Hosts:
    hosts: Hosts = request.getfixturevalue(getattr(request, "param", "namespaces"))
    return hosts


@pytest.fixture
def user(lab: Hosts, tmp_path: Path) -> User:
    return User(lab, tmp_path)

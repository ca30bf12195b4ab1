"""Connections by ssh: the user's configuration, shared connections, greetings, and refusals."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.hosts.user import User

sampled = pytest.mark.sample(2, of="connections")

TRAIN = "def train():\n    distrain.report({'place': place()})\n"


ALIASES = """
Host near
  HostName alpha
Host behind
  HostName 10.77.0.13
  Port 2222
  ProxyJump near
"""


@sampled
def test_the_users_configuration_is_used(user: User) -> None:
    """An alias, and a way through another host."""
    (user.folder / "hosts").write_text(f"near\nbehind python='{user.lab.other_python}'\n")
    home = user.lab.folder / "homes" / "head" / ".ssh" / "config"
    before = home.read_text()
    home.write_text(before + ALIASES)
    try:
        reports = user.trains(TRAIN, "num_workers=2, hostfile='hosts'").reports()
    finally:
        home.write_text(before)
    assert [report["place"][0] for report in reports] == ["alpha", "gamma"]


@sampled
def test_connections_may_be_shared_with_others(user: User) -> None:
    """With ControlMaster a process of ssh outlives the run, and holds our pipes."""
    shared = "-o ControlMaster=auto -o ControlPersist=1 -o ControlPath=%d/.ssh/%h"
    reports = user.trains(TRAIN, f"num_workers=2, hosts='alpha:1,beta:1', ssh_args={shared!r}").reports()
    assert [report["place"][0] for report in reports] == ["alpha", "beta"]


@sampled
def test_a_refusal_is_told_and_nobody_is_asked(user: User) -> None:
    """For a password, or whether an unknown host key is right."""
    for option, words in (
        ("PubkeyAuthentication=no", "Permission denied (publickey)"),
        ("UserKnownHostsFile=/dev/null", "Host key verification failed"),
    ):
        began = time.monotonic()
        ran = user.trains(TRAIN, f"num_workers=1, hosts='alpha:1', ssh_args='-o {option}'")
        assert ran.code == 1
        assert time.monotonic() - began < 20.0
        assert "distrain: cannot launch" in ran.err
        assert "alpha: distrain's process there has ended: exit code 255" in ran.err
        assert words in ran.err

"""Connections by ssh: the user's configuration, shared connections, greetings, and refusals."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.hosts.conftest import over

if TYPE_CHECKING:
    from tests.hosts.lab import Hosts
    from tests.hosts.user import User

sampled = pytest.mark.sample(2, of="connections")

TRAIN = "def train():\n    distrain.report({'place': place()})\n"


def refusal(user: User, call: str) -> str:
    began = time.monotonic()
    ran = user.trains(TRAIN, call)
    assert ran.code == 1
    assert time.monotonic() - began < 20.0
    return ran.err


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
def test_without_a_key_nobody_is_asked_for_a_password(user: User) -> None:
    text = refusal(user, "num_workers=1, hosts='alpha:1', ssh_args='-o PubkeyAuthentication=no'")
    assert "distrain: cannot launch" in text
    assert "alpha: distrain's process there has ended: exit code 255" in text
    assert "Permission denied (publickey)" in text


@sampled
def test_an_unknown_host_key_is_refused_and_not_asked_about(user: User) -> None:
    text = refusal(user, "num_workers=1, hosts='alpha:1', ssh_args='-o UserKnownHostsFile=/dev/null'")
    assert "Host key verification failed" in text


@sampled
@over("busy_sshd")
def test_hosts_that_a_busy_sshd_turns_away_are_connected_later(lab: Hosts, user: User) -> None:
    ran = user.trains("def train():\n    pass\n", "num_workers=6, hostfile=hostfile")
    assert ran.code == 0, ran.err
    assert "past MaxStartups" in (lab.folder / "log").read_text()  # which sshd says only once in five minutes
    ran = user.checks("--hostfile", str(lab.hostfile))
    assert ran.code == 0, ran.out

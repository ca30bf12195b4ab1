"""Hosts behind one sshd of an ordinary user: nobody is root there, and each host goes by its name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.hosts.conftest import over
from tests.hosts.one_machine import UID, Loopback

if TYPE_CHECKING:
    from tests.hosts.user import User

pytestmark = over("one_sshd")


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

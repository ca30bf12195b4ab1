"""The tutorial about many hosts, followed by a reader in front of two hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.documentation import ROOT, Reader, blocks_of
from tests.hosts.conftest import over

if TYPE_CHECKING:
    from tests.hosts.one_machine import Loopback
    from tests.hosts.user import User


@over("one_sshd")
@pytest.mark.timeout(300)
def test_the_tutorial_about_many_hosts(lab: Loopback, user: User) -> None:
    reader = Reader(lab.folder, lab.environment(), hosts=True, become=lab.become, columns=250)
    reader.follows(blocks_of(ROOT / "docs" / "tutorials" / "many_hosts.md"), user.folder)

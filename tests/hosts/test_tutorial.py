"""The tutorial about many hosts, followed by a reader in front of two hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.documentation import ROOT, Reader, blocks_of

if TYPE_CHECKING:
    from tests.hosts.lab import Lab
    from tests.hosts.user import User


@pytest.mark.timeout(300)
def test_the_tutorial_about_many_hosts(lab: Lab, user: User) -> None:
    home = lab.folder / "homes" / "head"
    settings = {**lab.environment(), "HOME": str(home)}
    reader = Reader(home, settings, hosts=True, become=lab.argv("head"), columns=250)
    reader.follows(blocks_of(ROOT / "docs" / "tutorials" / "many_hosts.md"), user.folder)

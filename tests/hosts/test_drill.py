"""``distrain drill`` over hosts, one of which is lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.drill.cases import FAULTY

if TYPE_CHECKING:
    from tests.hosts.user import User


@pytest.mark.slow
def test_the_loss_of_a_host_is_drilled(user: User) -> None:
    """Of a script that forgets the state of its optimizer."""
    *_, setting, script = FAULTY["optimizer"].arguments
    words = ["--json", "--only", "host", "--hosts", "alpha:1,beta:1", "--set", setting, script]
    ran = user.python("-m", "distrain", "drill", *words)
    verdicts = json.loads(ran.out)["verdicts"]
    assert [one["outcome"] for one in verdicts] == ["exact", "drift"], ran.out + ran.err
    assert [one["disturbance"] for one in verdicts][1:] == ["host beta is lost"]
    assert "optimizer" in {cause["name"] for cause in verdicts[1]["causes"]}, ran.out

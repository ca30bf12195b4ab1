"""A child that the kernel does not let go must not stop the loop of its parent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from distrain.system import process
from distrain.wire.child_link import ChildLink

if TYPE_CHECKING:
    import pytest


def test_nobody_waits_for_a_child_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one in an uninterruptible sleep, for a network file system that is gone."""
    link = ChildLink(["sleep", "1000"])
    with monkeypatch.context() as patch:
        patch.setattr(process, "kill_groups", lambda leaders: set())
        patch.setattr(process, "_REAP_S", 0.1)
        began = time.monotonic()
        assert link.kill() == -9
        assert time.monotonic() - began < 60
    assert link.process.poll() is None
    assert link.kill() == -9
    assert link.process.poll() == -9

"""The words about a rank that ran out of the host's memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from distrain.hosts import memory
from distrain.hosts.cgroup import OomKill
from distrain.hosts.memory import MemoryHistory

if TYPE_CHECKING:
    import pytest

GIB = 1 << 30
KILL = OomKill(8 * GIB, "/x")


def history(*looks: dict[int, int]) -> MemoryHistory:
    """One of a look each minute until now."""
    found = MemoryHistory()
    found._looks.extend((time.monotonic() - 60 * (len(looks) - n), uses) for n, uses in enumerate(looks))
    return found


def test_a_rank_that_has_grown_says_by_how_much() -> None:
    """At the last look, the kernel had freed a part already."""
    found = history({3: 3 * GIB, 4: GIB}, {3: 6 * GIB, 4: GIB}, {3: 5 * GIB, 4: GIB})
    assert found.in_words(3, 4 * GIB, KILL) == (
        "its processes used 6.0 GiB of the 8.0 GiB that the cgroup /x allows (all ranks of the host together: 7.0 "
        "GiB); 3.0 GiB more than 3 min before"
    )


def test_what_is_unknown_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MemoryHistory().in_words(3, 3 * GIB, KILL) == (
        "its processes used 3.0 GiB of the 8.0 GiB that the cgroup /x allows"
    )
    monkeypatch.setattr(memory, "memory_of_host", lambda: (60 * GIB, 64 * GIB))
    shrunk = history(*[{3: now * GIB} for now in (3, 2, 2)])
    assert shrunk.in_words(3, GIB, OomKill(0, "")) == "its processes used 2.0 GiB of the 64.0 GiB of the host"

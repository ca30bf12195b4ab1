"""The ends of workers, as the forkserver sees them."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest

from distrain.agent.forkserver import _is_out_of_cpu_time


@pytest.mark.parametrize(
    ("hard_s", "used_s", "expected"),
    [(resource.RLIM_INFINITY, 1e9, False), (5, 5.02, True), (5, 4.97, True), (5, 2.0, False)],
)
def test_a_hard_limit_of_cpu_time_is_told_from_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, hard_s: int, used_s: float, expected: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (hard_s, hard_s))
    usage: Any = SimpleNamespace(ru_utime=used_s - 1, ru_stime=1.0)
    assert _is_out_of_cpu_time(usage) is expected

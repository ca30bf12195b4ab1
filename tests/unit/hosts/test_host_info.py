"""The hardware of a host, as far as it can be tested without one of every kind."""

from __future__ import annotations

import os

import pytest

from distrain.hosts import host_info


@pytest.mark.parametrize(("quota", "cpus"), [(None, 3), (1.5, 1), (0.2, 1), (2.0, 2), (64.0, 3)])
def test_a_quota_cuts_the_cpus(quota: float | None, cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_info, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert host_info.usable_cpus() == cpus


def test_gpus_are_only_looked_for_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_info, "find_gpus", lambda environment: pytest.fail("looked"))
    info = host_info.host_info(with_gpus=False)
    assert info.gpus is None
    assert info.memory_bytes > 0

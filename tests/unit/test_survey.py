"""What a host has, as far as it can be told without one of every kind."""

from __future__ import annotations

import os

import pytest

from distrain import survey


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_nvml_device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("3,1", 2),
        ("0, 1, 2", 3),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,7,1", 1),
        ("NoDevFiles", 0),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,1", 2),
        ("MIG-GPU-8932f937/1/2", 1),
    ],
)
def test_gpus_are_counted_as_cuda_shows_them(visible: str | None, count: int) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert survey.count_gpus(environment) == count


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_nvml_device_count", lambda: 0)
    assert survey.count_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0


def test_cpus_are_at_least_one_and_at_most_the_affinity() -> None:
    assert 1 <= survey.usable_cpus() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "cpus"), [(None, 3), (1.5, 1), (0.2, 1), (2.0, 2), (64.0, 3)])
def test_a_quota_cuts_the_cpus(quota: float | None, cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert survey.usable_cpus() == cpus


def test_gpus_are_only_looked_for_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "count_gpus", lambda environment: pytest.fail("looked"))
    facts = survey.survey(with_gpus=False)
    assert facts.gpus is None
    assert facts.memory_bytes > 0

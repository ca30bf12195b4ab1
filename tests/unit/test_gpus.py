"""Which GPUs a process sees, from what is in the machine and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import pytest

from distrain import gpus
from distrain.hosts import Gpu


def whole(number: int) -> list[Gpu]:
    return [Gpu(name="NVIDIA H100", uuid=f"GPU-{number}f3a", board=f"GPU-{number}f3a")]


def split(number: int, instances: int) -> list[Gpu]:
    board = f"GPU-{number}f3a"
    return [Gpu(name="NVIDIA H100", uuid=f"MIG-{number}{index}ab", board=board) for index in range(instances)]


FOUR = [whole(0), whole(1), whole(2), whole(3)]
MIXED = [whole(0), split(1, 2), split(2, 3)]


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        (None, "0123"),
        ("", ""),
        ("0", "0"),
        ("3,1", "31"),
        ("0, 1, 2", "012"),
        ("-1", ""),
        ("0,-1,1", "0"),
        ("0,7,1", "0"),
        ("NoDevFiles", ""),
        ("GPU-2f3a,1", "21"),
        ("GPU-3", "3"),
        ("GPU-9,1", ""),
        ("MIG-00ab", ""),
        ("1,1", "1"),
    ],
)
def test_gpus_are_seen_as_cuda_shows_them(listed: str | None, seen: str) -> None:
    assert [gpu.uuid for gpu in gpus.visible(FOUR, listed)] == [f"GPU-{number}f3a" for number in seen]


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        (None, ["GPU-0f3a", "MIG-10ab", "MIG-11ab", "MIG-20ab", "MIG-21ab", "MIG-22ab"]),
        ("MIG-21ab,MIG-10ab", ["MIG-21ab", "MIG-10ab"]),
        ("MIG-22", ["MIG-22ab"]),
        ("1", ["MIG-10ab", "MIG-11ab"]),
        ("GPU-1f3a", ["MIG-10ab", "MIG-11ab"]),
        ("GPU-0,MIG-20ab", ["GPU-0f3a", "MIG-20ab"]),
    ],
)
def test_a_split_gpu_is_its_instances(listed: str | None, seen: list[str]) -> None:
    assert [gpu.uuid for gpu in gpus.visible(MIXED, listed)] == seen


def test_without_gpus_nothing_is_seen() -> None:
    assert gpus.visible([], "0,1") == ()


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_LIBRARIES", ("libno-such-library.so",))
    assert gpus.find_gpus({}) == ()

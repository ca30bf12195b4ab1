"""Which GPUs a process sees, from what is in the machine and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from distrain import forkserver, gpus
from distrain.hosts import Gpu, gpu_problem

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.mark.parametrize("boards", [FOUR, MIXED], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("named", "bad"),
    [
        ("0,2", None),
        ("2,0", None),
        ("GPU-2,0,GPU-1", None),
        ("0,7", "GPU 7"),
        ("7,0", "GPU 7"),
        ("0,GPU-none", "GPU-none"),
        ("0,MIG-99", "MIG-99"),
        ("0,GPU-0f3a", "GPU-0f3a"),
    ],
)
def test_the_first_gpu_of_a_hostfile_that_is_not_there_is_named(
    boards: list[list[Gpu]], named: str, bad: str | None
) -> None:
    problem = gpu_problem(named.split(","), gpus.visible(boards, named))
    assert problem is None if bad is None else f"gpus={named} in the hostfile, but it has no {bad}, or" in str(problem)


def test_instances_of_one_gpu_are_gpus_of_their_own_in_a_hostfile() -> None:
    named = "MIG-10,MIG-11,GPU-2"
    assert gpu_problem(named.split(","), gpus.visible(MIXED, named)) is None
    assert "no MIG-12" in str(gpu_problem(["MIG-10", "MIG-12"], gpus.visible(MIXED, "MIG-10,MIG-12")))


# -- what must not be forked -----------------------------------------------------------------------------------------


def test_an_open_gpu_is_seen_behind_a_gap_in_the_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor that lists the others falls into the gap, and is closed when its turn comes."""
    gpu = tmp_path / "nvidia-uvm"
    gpu.touch()
    monkeypatch.setattr(forkserver, "_CUDA_DEVICE", str(gpu))
    gap = os.open(os.devnull, os.O_RDONLY)
    fd = os.open(gpu, os.O_RDONLY)
    os.close(gap)
    try:
        assert forkserver._cuda_is_initialised()
    finally:
        os.close(fd)
    assert not forkserver._cuda_is_initialised()

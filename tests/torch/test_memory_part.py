"""Tensors that go into the memory of a host: bytes of the moment of report(), also from a GPU while it computes on."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from distrain import Checkpoint
from distrain.storage import separated
from distrain.worker.reporting.memory_part import MemoryParts

if TYPE_CHECKING:
    from collections.abc import Iterator

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def home() -> Iterator[Path]:
    path = tempfile.mkdtemp(dir="/dev/shm")
    yield Path(path) / "rank_0"
    shutil.rmtree(path)


def write(parts: MemoryParts, ordinal: int, value: object) -> tuple[Path, threading.Event]:
    """Write a part. The event is set when all bytes are there."""
    part = parts.write(f"0-{ordinal}", Checkpoint.from_dict({"value": value}))
    done = threading.Event()
    if part.copy_from_gpu is None:
        done.set()
    else:
        parts.finish(part, lambda failed: done.set() if failed is None else pytest.fail(failed))
    return part.folder, done


@on_each_device
def test_the_bytes_are_those_of_the_moment_of_the_report(home: Path, device: str) -> None:
    parts = MemoryParts(home)
    weights = {name: torch.zeros(8 << 20, device=device) for name in "abc"} | {"scalar": torch.zeros((), device=device)}
    views = [weights["a"][5:9], weights["a"].view(2, -1).t()]
    for ordinal in range(1, 7):
        for weight in weights.values():
            weight.fill_(ordinal)
        folder, done = write(parts, ordinal, (weights, views))
        for weight in weights.values():  # the next step
            weight.mul_(-1).add_(torch.randn_like(weight))
        assert done.wait(60)
        again, seen = Checkpoint(folder).to_dict()["value"]
        assert all(bool((weight == ordinal).all()) and weight.device.type == "cpu" for weight in again.values())
        assert seen[0].untyped_storage().data_ptr() == again["a"].untyped_storage().data_ptr()
        assert seen[1].stride() == views[1].stride()
        folder.rename(home / f"free-{ordinal}")
    assert len(parts._buffers) == 1


@pytest.mark.gpu
def test_all_dtypes_come_back_from_a_gpu(home: Path) -> None:
    value = [
        torch.randint(0, 2, (1001,), device="cuda").to(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.complex64, torch.int64, torch.float8_e4m3fn)
    ] + [torch.empty(0, 3, device="cuda"), torch.nn.Parameter(torch.ones(3, device="cuda")), torch.ones(3)]
    folder, done = write(MemoryParts(home), 1, value)
    assert done.wait(60)
    for before, after in zip(value, Checkpoint(folder).to_dict()["value"], strict=True):
        assert after.dtype == before.dtype
        assert after.requires_grad == before.requires_grad
        assert after.detach().view(torch.uint8).equal(before.detach().cpu().view(torch.uint8))


@pytest.mark.gpu
def test_a_gpu_computes_on_and_the_call_returns_before_the_bytes_are_copied(home: Path) -> None:
    parts, weight = MemoryParts(home), torch.ones(512 << 20, device="cuda")  # 2 GiB
    for ordinal in range(1, 4):  # the first pins the memory
        torch.cuda.synchronize()
        began = time.monotonic()
        folder, done = write(parts, ordinal, weight)
        returned, was_done = time.monotonic() - began, done.is_set()
        assert done.wait(60)
        copied = time.monotonic() - began
        print(f"2 GiB: report() blocks for {1e3 * returned:.2f} ms, and the copy ends after {1e3 * copied:.0f} ms")
        assert not was_done
        folder.rename(home / f"free-{ordinal}")
    assert parts._buffers[0]._pinned_at
    assert returned < copied / 4


@pytest.mark.gpu
def test_a_full_gpu_is_copied_without_a_clone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.arange(1 << 20, device="cuda")
    monkeypatch.setattr(separated, "_GPU_RESERVE", 1 << 60)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    part = MemoryParts(home).write("0-1", Checkpoint.from_dict({"value": weight}))
    assert part.copy_from_gpu is None
    assert torch.cuda.max_memory_allocated() < before + weight.nbytes
    assert Checkpoint(part.folder).to_dict()["value"].equal(weight.cpu())


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_is_copied_all_the_same(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = torch.cuda.cudart()

    class Cudart:
        cudaMemGetInfo = staticmethod(cudart.cudaMemGetInfo)

        def cudaHostRegister(self, *_: int) -> int:
            return 1

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    weight = torch.arange(1 << 20, device="cuda")
    folder, done = write(MemoryParts(home), 1, weight)
    weight.zero_()
    assert done.wait(60)
    assert Checkpoint(folder).to_dict()["value"].equal(torch.arange(1 << 20))


@pytest.mark.gpu
def test_a_buffer_of_another_size_is_pinned_anew(home: Path) -> None:
    parts = MemoryParts(home)
    for ordinal, size in enumerate((1 << 20, 1 << 22, 1 << 19), start=1):
        folder, done = write(parts, ordinal, torch.full((size,), ordinal, device="cuda"))
        assert done.wait(60)
        assert bool((Checkpoint(folder).to_dict()["value"] == ordinal).all())
        assert [bool(buffer._pinned_at) for buffer in parts._buffers] == [True]
        folder.rename(home / f"free-{ordinal}")
    torch.ones(3, device="cuda").add_(1)
    torch.cuda.synchronize()  # no error is left behind

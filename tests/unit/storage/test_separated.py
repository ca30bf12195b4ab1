"""Values whose tensors and arrays are bytes in a second file."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distrain import Checkpoint, CheckpointError
from distrain.storage.separated import Separated, load, map_file
from distrain.system.pickling import pickled

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    *(dtype for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if (dtype := getattr(torch, name, None))),
]  # fmt: skip


def stored(value: Any, folder: Path, *, alone: bool = False) -> Any:
    """The value after it was written to two files, or one (``alone``), and read again."""
    if alone:
        return pickle.loads(pickled(value))
    separated = Separated(value)
    path = folder / "bytes.bin"
    path.unlink(missing_ok=True)
    separated.write(path)
    return read(separated, path)


def read(separated: Separated, path: Path) -> Any:
    with contextlib.ExitStack() as stack:
        return load(separated.skeleton, lambda: stack.enter_context(path.open("rb")))


def same(one: Any, other: Any) -> bool:
    """True for tensors with the same bytes, which also NaN has."""
    if one.dtype != other.dtype or one.shape != other.shape or one.requires_grad != other.requires_grad:
        return False
    pair = [
        each.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        for each in (one, other)
    ]
    return torch.equal(*pair)


in_one_file_or_two = pytest.mark.parametrize("alone", [False, True])


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=4),
    transposed=st.booleans(),
    step=st.integers(1, 3),
    seed=st.integers(0, 1000),
    alone=st.booleans(),
)
@settings(max_examples=300, deadline=None)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_plain_tensor_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    shape: list[int],
    transposed: bool,
    step: int,
    seed: int,
    alone: bool,
) -> None:
    count = torch.Size(shape).numel() * dtype.itemsize
    body = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))  # fmt: skip
    tensor = body.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    if shape:
        tensor = tensor[::step]
    if transposed:
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    [again] = stored([tensor], tmp_path_factory.getbasetemp(), alone=alone)
    assert same(again, tensor)
    assert again.stride() == tensor.stride()


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize", "ignore:TypedStorage")
@in_one_file_or_two
def test_other_kinds_of_tensors_come_back(tmp_path: Path, alone: bool) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    value = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(dense, 0.1, 3, torch.quint8),
        "meta": torch.empty(1000, device="meta"),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    }
    again = stored(value, tmp_path, alone=alone)
    assert torch.equal(again["coo"].to_dense(), dense)
    assert torch.equal(again["csr"].to_dense(), dense)
    assert torch.equal(again["quantized"].dequantize(), value["quantized"].dequantize())
    assert (again["meta"].device.type, again["meta"].shape) == ("meta", (1000,))
    assert again["conjugate"].tolist() == [1 - 2j]
    assert again["scalar"].item() == 7
    assert again["empty"].shape == (0, 3)
    assert type(again["parameter"]) is torch.nn.Parameter
    assert not again["parameter"].requires_grad


@in_one_file_or_two
def test_views_still_share_their_memory_and_the_bytes_are_there_once(tmp_path: Path, alone: bool) -> None:
    base = torch.arange(1000.0)
    value = {"base": base, "view": base[10:20], "tied": [base, base], "typed": base.view(torch.int32)}
    value |= {"new": base.view(torch.uint32), "quarter": base.view(torch.float8_e4m3fn)}
    assert Separated(value).size == 4000
    assert len(pickled(value)) < 7000
    again = stored(value, tmp_path, alone=alone)
    again["base"].resize_(1000)
    assert again["new"].data_ptr() == again["quarter"].data_ptr() == again["base"].data_ptr()
    again["base"][10] = -1
    assert again["view"][0] == -1
    assert again["tied"][0] is again["tied"][1] is again["base"]
    assert again["typed"].data_ptr() == again["base"].data_ptr()


def test_what_is_read_is_private_memory(tmp_path: Path) -> None:
    separated, path = Separated({"x": torch.ones(1000), "y": np.ones(1000)}), tmp_path / "bytes.bin"
    buffer = map_file(path, separated.size)
    separated.fill(buffer)
    again = read(separated, path)
    buffer[:] = bytes(len(buffer))
    path.unlink()
    assert again["x"].sum() == again["y"].sum() == 1000
    again["x"].add_(1)
    again["y"] += 1


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(12)[::2],
        np.array(["a", "bc"]),
        np.array([{"x": 1}], dtype=object),
        np.zeros((0, 3)),
        np.float32(3),
    ],
)
def test_arrays_come_back(tmp_path: Path, array: Any) -> None:
    again = stored({"array": array, "tensor": torch.ones(3), "again": array}, tmp_path)
    assert np.array_equal(again["array"], array)
    assert again["array"].dtype == array.dtype
    assert again["again"] is again["array"]
    assert again["tensor"].tolist() == [1, 1, 1]


def test_pickles_need_only_torch_and_those_of_earlier_versions_can_be_read(tmp_path: Path) -> None:
    value = {"x": torch.ones(3), "same": torch.ones(3)}
    program = """
import pickle, sys
assert pickle.load(sys.stdin.buffer)["x"].sum() == 3
assert "distrain" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], input=pickled(value), check=True)
    (tmp_path / "dict_checkpoint.pkl").write_bytes(cloudpickle.dumps(value))  # as it was once done
    assert Checkpoint(tmp_path).to_dict()["x"].tolist() == [1, 1, 1]


@pytest.mark.gpu
def test_pickled_tensors_of_a_gpu_come_back_on_the_cpu() -> None:
    value = [torch.arange(1000, device="cuda"), torch.ones(3, device="cuda").to(torch.float8_e4m3fn)]
    for before, again in zip(value, pickle.loads(pickled(value)), strict=True):
        assert again.device.type == "cpu"
        assert same(again, before.cpu())


def test_plain_pickles_can_be_read_too() -> None:
    def fail() -> Any:
        raise AssertionError

    assert torch.equal(load(pickled({"x": torch.ones(3)}), fail)["x"], torch.ones(3))
    assert load(pickle.dumps([1]), fail) == [1]


def test_a_short_file_is_damaged(tmp_path: Path) -> None:
    separated, path = Separated([torch.ones(1000)]), tmp_path / "bytes.bin"
    separated.write(path)
    os.truncate(path, 100)
    with pytest.raises(CheckpointError, match=r"bytes\.bin is damaged"):
        read(separated, path)


def test_a_file_that_others_read_is_made_anew(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "b"
    map_file(path, 3)[:] = b"old"
    os.link(path, link)
    map_file(path, 4)[:] = b"newer"[:4]
    assert (path.read_bytes(), link.read_bytes()) == (b"newe", b"old")
    inode = path.stat().st_ino
    link.unlink()
    map_file(path, 2)[:] = b"no"
    assert (path.read_bytes(), path.stat().st_ino) == (b"no", inode)


# -- as checkpoints --------------------------------------------------------------------------------------------------


def test_a_checkpoint_with_separated_tensors_is_read_like_any_other(tmp_path: Path) -> None:
    made = Checkpoint.separated_from({"x": torch.ones(3), "step": 7}, "part")
    made.set_metadata({"a": 1})
    again = Checkpoint(made.to_directory(tmp_path / "copy"))
    assert sorted(path.name for path in Path(again.path).iterdir()) == [".metadata.json", "part.bin", "part.pkl"]
    data = copy.deepcopy(again).read("part")
    assert data is not None
    assert (data["x"].tolist(), data["step"], again.get_metadata()) == ([1, 1, 1], 7, {"a": 1})
    assert again.read("other") is None
    with made.as_directory() as folder:
        assert (Path(folder) / "part.bin").stat().st_size == 12
    with Checkpoint.separated_from(None, "part").as_directory() as folder:
        assert not list(Path(folder).iterdir())

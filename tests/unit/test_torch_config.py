"""TorchConfig without torch: which backend, and TorchTrainer's other name for it."""

from __future__ import annotations

from typing import Any

import pytest

from distrain.api.context import TrainContext
from distrain.torch import TorchConfig, TorchTrainer
from distrain.torch.config import _accelerate_variables, _nccl_device

GLOO_IS_USED = "distrain: workers share a GPU, which NCCL cannot do; using gloo\n"


def context(devices: tuple[int, ...] = (), *, shares_gpu: bool = False, rank: int = 0) -> TrainContext:
    return TrainContext(
        world_rank=rank, world_size=2, local_rank=rank, local_world_size=2, node_rank=0, run_name="run",
        storage_path="/runs", attempt=0, devices=devices, shares_gpu=shares_gpu,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "worker", "used"),
    [
        (None, context(), "gloo"),
        (None, context((0,)), "nccl"),
        (None, context((0,), shares_gpu=True), "gloo"),
        ("cpu:gloo,cuda:nccl", context((0,)), "cpu:gloo,cuda:nccl"),
        ("mpi", context((0,), shares_gpu=True), "mpi"),
    ],
)
def test_the_backend_that_is_used(asked: str | None, worker: TrainContext, used: str) -> None:
    assert TorchConfig(backend=asked)._backend(worker) == used


@pytest.mark.parametrize("asked", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_for_workers_that_share_a_gpu_is_refused_with_the_fix(asked: str) -> None:
    with pytest.raises(ValueError, match=rf"TorchConfig.backend='{asked}'.*share a GPU.*leave it out"):
        TorchConfig(backend=asked)._backend(context((0,), shares_gpu=True))


@pytest.mark.parametrize(
    ("worker", "backend", "said"),
    [
        (context((0,), shares_gpu=True), None, GLOO_IS_USED),
        (context((0,), shares_gpu=True, rank=1), None, ""),
        (context((0,), shares_gpu=True), "gloo", ""),
        (context((0,)), None, ""),
        (context(), None, ""),
    ],
)
def test_the_fall_back_is_said_once_and_only_if_it_is_one(
    capsys: pytest.CaptureFixture[str], worker: TrainContext, backend: str | None, said: str
) -> None:
    TorchConfig(backend=backend)._backend(worker)
    assert capsys.readouterr() == ("", said)


# -- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "backend", "device"),
    [
        (context((0,)), "nccl", "cuda:0"),
        (context((2, 3)), "cpu:gloo,cuda:nccl", "cuda:2"),
        (context((0,)), "gloo", None),
        (context(), "nccl", None),
    ],
)
def test_nccl_is_told_its_gpu(worker: TrainContext, backend: str, device: str | None) -> None:
    assert _nccl_device(worker, backend) == device


@pytest.mark.parametrize(
    ("worker", "variables"),
    [
        (context(), {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_CPU": "true"}),
        (context((1,), rank=1), {"ACCELERATE_TORCH_DEVICE": "cuda:1"}),
        (context((2, 3), rank=1), {"ACCELERATE_TORCH_DEVICE": "cuda:2", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}),
        (context((0,), rank=1), {"ACCELERATE_TORCH_DEVICE": "cuda:0", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}),
    ],
)
def test_accelerate_is_told_its_device(worker: TrainContext, variables: dict[str, str]) -> None:
    assert _accelerate_variables(worker) == variables


# -- torch_backend ---------------------------------------------------------------------------------------------------


def test_the_old_name_works_and_says_so_at_the_users_line() -> None:
    config = TorchConfig(backend="gloo")
    with pytest.warns(DeprecationWarning, match="use torch_config") as warned:
        trainer = TorchTrainer(print, torch_backend=config)
    assert [warning.filename for warning in warned] == [__file__]
    assert trainer._work.backend is config


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(TypeError, match="old name of"):
        TorchTrainer(print, torch_config=TorchConfig(), torch_backend=TorchConfig())


@pytest.mark.parametrize("name", ["torch_config", pytest.param("torch_backend")])
@pytest.mark.filterwarnings("ignore:torch_backend")
def test_a_name_of_a_backend_is_no_config(name: str) -> None:
    arguments: dict[str, Any] = {name: "gloo"}
    with pytest.raises(TypeError, match=r"torch_config must be a distrain\.torch\.TorchConfig or None, got 'gloo'"):
        TorchTrainer(print, **arguments)


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (RuntimeError("Found no NVIDIA driver on your system."), "distrain.torch.get_device(), the device"),
        (ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"), "leave TorchConfig.backend out"),
        (RuntimeError("ifa != nullptr. Unable to find address for: ib9"), "correct GLOO_SOCKET_IFNAME"),
        (AttributeError("'DistributedDataParallel' object has no attribute 'fc'"), "your model: it is model.module"),
        (
            AttributeError("'NoneType' object has no attribute 'seek'. You can only torch.load from a file"),
            "in a new run",
        ),
        (RuntimeError("a bug"), "None"),
    ],
)
def test_a_common_error_ends_with_its_cure(error: Exception, cure: str) -> None:
    assert cure in str(TorchConfig().explain(error))

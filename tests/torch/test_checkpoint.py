"""TorchCheckpoint, and dict checkpoints that hold DistributedDataParallel."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import distrain
from distrain import Checkpoint, CheckpointError
from distrain.torch import TorchCheckpoint, prepare_model
from distrain.torch.checkpoint import portable
from tests.torch.ranks import fit

if TYPE_CHECKING:
    from collections.abc import Iterator

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.layer(x))
        return y


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    ones, others = one.state_dict(), other.state_dict()
    return ones.keys() == others.keys() and all(torch.equal(ones[key], others[key]) for key in ones)


@pytest.fixture
def ddp(tmp_path: Path) -> Iterator[DistributedDataParallel]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield DistributedDataParallel(Net())
    distributed.destroy_process_group()


# -- TorchCheckpoint ---------------------------------------------------------------------------------------------------


def test_a_state_dict_goes_into_a_model_and_comes_back() -> None:
    source, target = Net(), Net()
    checkpoint = TorchCheckpoint.from_state_dict(source.state_dict())
    assert isinstance(checkpoint, TorchCheckpoint)
    assert checkpoint.get_model(target) is target
    assert same_weights(source, target)
    with pytest.raises(ValueError, match=r"call get_model\(MyModel\(\)\)"):
        checkpoint.get_model()


def test_ddp_is_not_part_of_the_checkpoint(ddp: DistributedDataParallel) -> None:
    assert type(TorchCheckpoint.from_model(ddp).get_model()) is Net
    for checkpoint in (TorchCheckpoint.from_model(ddp), TorchCheckpoint.from_state_dict(ddp.state_dict())):
        target = Net()
        assert checkpoint.get_model(target) is target
        assert same_weights(target, ddp.module)
        other = DistributedDataParallel(Net())
        assert checkpoint.get_model(other) is other
        assert same_weights(other.module, ddp.module)


def test_a_dict_checkpoint_gives_its_model(tmp_path: Path) -> None:
    source, target = Net(), Net()
    checkpoint = Checkpoint.from_dict({"model": source.state_dict(), "epoch": 3})
    assert TorchCheckpoint.from_checkpoint(checkpoint).get_model(target) is target
    assert same_weights(source, target)
    again = TorchCheckpoint(checkpoint.to_directory(tmp_path)).get_model(Net())
    assert same_weights(source, again)
    without = TorchCheckpoint.from_checkpoint(Checkpoint.from_dict({"weights": 1}))
    with pytest.raises(CheckpointError, match=r"from_dict\(\['weights'\]\) has no model.pt"):
        without.get_model()


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"from_model takes a torch\.nn\.Module, got OrderedDict"):
        TorchCheckpoint.from_model(Net().state_dict())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="from_state_dict takes a dict, got Net"):
        TorchCheckpoint.from_state_dict(Net())  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"has no model\.pt"):
        TorchCheckpoint(tmp_path).get_model()


def test_the_temporary_files_go_with_the_checkpoint_in_its_own_process(tmp_path: Path) -> None:
    checkpoint = TorchCheckpoint.from_state_dict(Net().state_dict())
    folder = Path(checkpoint.path)
    child = os.fork()
    if not child:
        del checkpoint
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert (folder / "model.pt").is_file()
    reference = pickle.loads(pickle.dumps(checkpoint))
    assert type(reference) is TorchCheckpoint
    copied = TorchCheckpoint(checkpoint.to_directory(tmp_path / "copy"))
    del checkpoint, reference
    gc.collect()
    assert not folder.exists()
    copied.get_model(Net())


def test_a_reported_model_can_be_had_from_the_result(storage: Path) -> None:
    def train(config: dict[str, Any]) -> list[list[float]]:
        model = prepare_model(Net())
        distrain.report({"loss": 1.0}, checkpoint=TorchCheckpoint.from_state_dict(model.state_dict()))
        checkpoint = distrain.get_checkpoint()
        assert checkpoint is None or same_weights(TorchCheckpoint(checkpoint.path).get_model(Net()), model.module)
        distributed.barrier()  # a rank that has not reported yet would be written off by the others' second report
        weight = next(model.parameters()).tolist()
        distrain.report({"loss": 0.5}, checkpoint=TorchCheckpoint.from_model(model))
        return weight

    result = fit(train, storage)
    assert result.checkpoint is not None
    model = TorchCheckpoint(result.checkpoint.path).get_model()
    assert type(model).__name__ == "Net"
    assert next(model.parameters()).tolist() == result.return_value


# -- dict checkpoints --------------------------------------------------------------------------------------------------


def test_a_portable_dict_has_no_trace_of_ddp(ddp: DistributedDataParallel) -> None:
    state_dict = ddp.state_dict()
    given = {"model": ddp, "weights": state_dict, "epoch": 3, "plain": ddp.module}
    keys, metadata = list(state_dict), copy.deepcopy(state_dict._metadata)
    made = portable(given)

    assert made.keys() == given.keys()
    assert made["model"] is made["plain"] is ddp.module
    assert made["epoch"] == 3
    assert type(made["weights"]) is OrderedDict
    assert list(made["weights"]) == list(ddp.module.state_dict())
    assert made["weights"]._metadata == ddp.module.state_dict()._metadata
    Net().load_state_dict(made["weights"])

    assert given["model"] is ddp
    assert given["weights"] is state_dict
    assert list(state_dict) == keys
    assert state_dict._metadata == metadata


def test_what_is_sharded_is_refused(ddp: DistributedDataParallel) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    tensors = pytest.importorskip("torch.distributed.tensor.placement_types", reason="torch 2.4 keeps them elsewhere")
    from torch.distributed.tensor import distribute_tensor

    sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [tensors.Shard(0)])
    for value in (sharded, {"layer.weight": sharded}, {"state": {0: {"exp_avg": sharded}}}, [(1, [sharded])]):
        with pytest.raises(ValueError, match="sharded"):
            portable({"weights": value})


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"module.weight": torch.ones(1), "head.weight": torch.ones(1)},
        {"module.weight": torch.ones(1), "module.name": "text"},
        {"module.weight": torch.ones(1), 3: torch.ones(1)},
        {"modules": torch.ones(1)},
        ["module.weight"],
        torch.optim.SGD(nn.Linear(1, 1).parameters()).state_dict(),
    ],
)
def test_other_values_are_left_as_they_are(value: Any) -> None:
    assert portable({"value": value})["value"] is value


class Outer(nn.Module):
    """A model whose only child has the name that DDP gives to its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile])
def test_a_submodule_called_module_keeps_its_name(ddp: DistributedDataParallel, depth: int, wrap: Any) -> None:
    model: nn.Module = nn.Linear(3, 2)
    for _ in range(depth):
        model = Outer(model)
    names = list(model.state_dict())
    for wrapped in (wrap(model), DistributedDataParallel(wrap(model))):
        saved = wrapped.state_dict()
        made = portable({"model": saved})["model"]
        assert list(made) == names
        model.load_state_dict(made)
        TorchCheckpoint.from_state_dict(saved).get_model(model)
        TorchCheckpoint.from_dict({"model": saved}).get_model(wrap(model))  # as it was saved elsewhere


def test_weights_find_the_model_whatever_had_wrapped_them(ddp: DistributedDataParallel) -> None:
    for target in (ddp, ddp.module, torch.compile(ddp)):
        for prefix in ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."):
            saved = {f"{prefix}{name}": torch.full_like(value, 3) for name, value in Net().state_dict().items()}
            ddp.module.layer.weight.data.zero_()
            TorchCheckpoint.from_dict({"model": saved}).get_model(target)
            assert bool((ddp.module.layer.weight == 3).all())
    with pytest.raises(RuntimeError, match="Missing key"):
        TorchCheckpoint.from_dict({"model": {"module.other": torch.ones(1)}}).get_model(Net())

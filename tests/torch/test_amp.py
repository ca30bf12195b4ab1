"""accelerate, prepare_optimizer, backward: mixed precision."""

from __future__ import annotations

import copy
import pickle
import pickletools
import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch
from torch import nn

import distrain
from distrain.torch import accelerate, amp, backward, get_device, prepare_model, prepare_optimizer
from tests.torch.ranks import acting_as, fit_on_gpus, run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


shards_on_cpu = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 is for GPUs only")


def test_without_accelerate_the_others_change_nothing() -> None:
    model = nn.Linear(2, 1)
    with acting_as(0, 1):
        accelerate(amp=True)
        accelerate()
        assert prepare_model(model) is model
    assert "forward" not in vars(model)
    optimizer = torch.optim.SGD(model.parameters())
    assert prepare_optimizer(optimizer) is optimizer
    backward(model(torch.ones(1, 2)).sum())
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"distrain\.torch\.accelerate\(\) only works inside a worker"):
        accelerate()
    with pytest.raises(TypeError, match="takes a torch optimizer, got Linear"):
        prepare_optimizer(nn.Linear(1, 1))  # type: ignore[arg-type]


class Probe(nn.Module):
    """Says in which precision it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.layer(x)
        self.seen.append(y.dtype)
        return {"logits": y, "list": [y, y.double(), y.argmax(dim=1)], "name": "probe"}


@pytest.fixture
def probe() -> Iterator[Probe]:
    with acting_as(0, 1):
        accelerate(amp=True)
        model = prepare_model(Probe())
        assert isinstance(model, Probe)
        yield model


def test_a_model_computes_in_lower_precision_and_returns_the_usual_one(probe: Probe) -> None:
    output = probe(torch.ones(2, 4))
    assert probe.seen == [torch.bfloat16]
    assert output["logits"].dtype is torch.float32
    assert [tensor.dtype for tensor in output["list"]] == [torch.float32, torch.float64, torch.int64]
    assert output["name"] == "probe"
    backward(nn.functional.cross_entropy(output["logits"], torch.tensor([0, 1])))
    assert probe.layer.weight.dtype is probe.layer.weight.grad.dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")


def imported_by(packed: bytes) -> set[str]:
    """Return the packages that unpickling these bytes imports. Their paths in the pickle are no matter."""
    strings = [value for _, value, _ in pickletools.genops(packed) if isinstance(value, str)]
    return {string.partition(".")[0] for string in strings}


def test_a_pickled_model_is_an_ordinary_one(probe: Probe, tmp_path: Path) -> None:
    torch.save(probe, tmp_path / "model.pt", pickle_module=cloudpickle)
    packed = cloudpickle.dumps(probe)
    assert "distrain" not in imported_by(packed)
    for model in (pickle.loads(packed), torch.load(tmp_path / "model.pt", weights_only=False)):
        model(torch.ones(2, 4))
        assert model.seen == [torch.float32]
        assert torch.equal(model.layer.weight, probe.layer.weight)


def test_a_copied_model_computes_with_its_own_weights(probe: Probe) -> None:
    clone = copy.deepcopy(probe)
    with torch.no_grad():
        clone.layer.weight.zero_()
        clone.layer.bias.zero_()
    assert clone(torch.ones(2, 4))["logits"].abs().sum() == 0
    assert probe(torch.ones(2, 4))["logits"].abs().sum() > 0
    assert clone.seen == [torch.bfloat16]


# -- GPUs without bfloat16 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "lacks"), [((7, 0), True), ((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_a_gpu_that_would_emulate_bfloat16_lacks_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], lacks: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert amp._lacks_bfloat16(torch.device("cuda", 0)) is lacks
    assert not amp._lacks_bfloat16(torch.device("cpu"))


def test_there_a_model_computes_in_full_precision_and_the_user_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(amp, "_lacks_bfloat16", lambda device: True)
    with acting_as(0, 1):
        accelerate(amp=True)
        model = prepare_model(Probe())
        model(torch.ones(2, 4))
    assert model.seen == [torch.float32]
    assert "for float16, use torch.autocast and torch.amp.GradScaler" in capsys.readouterr().err


# -- with real ranks ---------------------------------------------------------------------------------------------------


def train_with_amp() -> dict[str, Any]:
    """The documented loop, with each strategy; returns losses and the precision that the model computed in."""
    accelerate(amp=True)
    losses: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp", None):
        torch.manual_seed(0)
        seen: list[str] = []
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        model[0].register_forward_hook(lambda module, args, output, seen=seen: seen.append(str(output.dtype)))
        model = prepare_model(model, parallel_strategy=strategy)
        optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
        x = torch.linspace(-1, 1, 24, device=get_device()).reshape(6, 4)
        losses[str(strategy)] = []
        for _ in range(10):
            loss = nn.functional.cross_entropy(model(x), torch.tensor([0, 0, 1, 1, 2, 2], device=get_device()))
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            losses[str(strategy)].append(loss.item())
        losses["seen"] = sorted(set(seen))
    distrain.report(losses)
    return losses


def check(losses: dict[str, Any]) -> None:
    assert losses["seen"] == ["torch.bfloat16"]
    assert losses["ddp"][-1] < 0.5 * losses["ddp"][0]
    assert losses["fsdp"] == pytest.approx(losses["ddp"], rel=0.05)
    assert losses["None"] == pytest.approx(losses["ddp"], rel=0.05)


@shards_on_cpu
def test_the_three_calls_train_under_every_strategy(storage: Path) -> None:
    for losses in run_on_ranks(train_with_amp, storage):
        check(losses)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu(2))])
def test_the_three_calls_train_on_gpus(storage: Path, workers: int) -> None:
    check(fit_on_gpus(train_with_amp, storage, workers))

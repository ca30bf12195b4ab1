"""accelerate, prepare_optimizer, backward: mixed precision on the CPU, and the parts of it that GPUs need."""

from __future__ import annotations

import copy
import json
import pickle
import pickletools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch
from torch import nn

import distrain
from distrain.api.context import TrainContext
from distrain.torch import TorchTrainer, accelerate, backward, get_device, prepare_model, prepare_optimizer
from distrain.torch.amp import LossScaler, ScaledOptimizer
from distrain.worker.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


shards_on_cpu = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 is for GPUs only")


def a_session() -> Session:
    context = TrainContext(
        world_rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, run_name="run",
        storage_path="nowhere", attempt=0, devices=(),
    )  # fmt: skip
    return Session(None, context, None)  # type: ignore[arg-type]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """This process is a run's only worker, as far as the public functions can tell; a call makes it that of another."""

    def anew() -> None:
        monkeypatch.setattr(Session, "current", a_session())

    anew()
    return anew


# -- what was chosen ---------------------------------------------------------------------------------------------------


def test_without_accelerate_the_others_change_nothing(worker: Callable[[], None]) -> None:
    model = nn.Linear(2, 1)
    assert prepare_model(model) is model
    assert "forward" not in vars(model)
    optimizer = torch.optim.SGD(model.parameters())
    assert prepare_optimizer(optimizer) is optimizer
    backward(model(torch.ones(1, 2)).sum())
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    "first",
    [
        lambda: accelerate(),
        lambda: accelerate(amp=True),
        lambda: prepare_model(nn.Linear(1, 1)),
        lambda: prepare_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters())),
        lambda: backward(torch.ones(1, requires_grad=True)),
    ],
)
def test_accelerate_comes_first_and_once(first: Callable[[], Any]) -> None:
    first()
    with pytest.raises(RuntimeError, match=r"accelerate\(\) comes too late"):
        accelerate(amp=True)


def test_what_one_run_chose_is_nothing_to_the_next(worker: Callable[[], None]) -> None:
    """With num_workers=0 both run in the user's process."""
    accelerate(amp=True)
    assert "forward" in vars(prepare_model(nn.Linear(1, 1)))
    worker()
    assert "forward" not in vars(prepare_model(nn.Linear(1, 1)))
    worker()
    accelerate(amp=True)


def test_outside_of_a_worker_they_say_where_they_belong() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    for call in (accelerate, lambda: prepare_optimizer(optimizer), lambda: backward(torch.ones(1))):
        with pytest.raises(RuntimeError, match=r"distrain\.torch\.\w+\(\) only works inside a worker"):
            call()  # type: ignore[operator]


@pytest.mark.usefixtures("worker")
def test_only_an_optimizer_is_taken_for_one() -> None:
    with pytest.raises(TypeError, match="takes a torch optimizer, got Linear"):
        prepare_optimizer(nn.Linear(1, 1))  # type: ignore[arg-type]


# -- the model ---------------------------------------------------------------------------------------------------------


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
def probe(worker: Callable[[], None]) -> Probe:
    accelerate(amp=True)
    model = prepare_model(Probe())
    assert isinstance(model, Probe)
    return model


def test_a_model_computes_in_lower_precision_and_returns_the_usual_one(probe: Probe) -> None:
    output = probe(torch.ones(2, 4))
    assert probe.seen == [torch.bfloat16]
    assert output["logits"].dtype is torch.float32
    assert [tensor.dtype for tensor in output["list"]] == [torch.float32, torch.float64, torch.int64]
    assert output["name"] == "probe"
    assert probe.layer.weight.dtype is torch.float32
    backward(nn.functional.cross_entropy(output["logits"], torch.tensor([0, 1])))
    assert probe.layer.weight.grad.dtype is torch.float32
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
        assert "distrain" not in imported_by(cloudpickle.dumps(model))


def test_a_copied_model_computes_with_its_own_weights(probe: Probe) -> None:
    clone = copy.deepcopy(probe)
    with torch.no_grad():
        clone.layer.weight.zero_()
        clone.layer.bias.zero_()
    assert clone(torch.ones(2, 4))["logits"].abs().sum() == 0
    assert probe(torch.ones(2, 4))["logits"].abs().sum() > 0
    assert clone.seen == [torch.bfloat16]


def test_a_forward_that_was_put_over_the_class_is_kept(worker: Callable[[], None]) -> None:
    accelerate(amp=True)
    model = nn.Linear(2, 2)
    model.forward = lambda x: x + 1  # type: ignore[method-assign]
    prepared = prepare_model(model)
    assert prepared(torch.ones(1)) == 2
    assert cloudpickle.loads(cloudpickle.dumps(prepared))(torch.ones(1)) == 2


# -- the optimizer: what GPUs need, computed on the CPU ----------------------------------------------------------------


def scaled(model: nn.Module, **options: Any) -> tuple[LossScaler, ScaledOptimizer]:
    scaler = LossScaler("cpu")
    return scaler, ScaledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, **options), scaler)


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def test_scaled_steps_are_those_of_the_unscaled_loss(model: nn.Linear) -> None:
    other = copy.deepcopy(model)
    plain = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    scaler, optimizer = scaled(model, momentum=0.9)
    for step in range(4):
        x = torch.full((2, 3), step + 1.0)
        optimizer.zero_grad()
        scaler.backward(model(x).square().mean())
        assert model.weight.grad.abs().max() > 1000
        optimizer.step()
        plain.zero_grad()
        other(x).square().mean().backward()
        plain.step()
    torch.testing.assert_close(model.state_dict(), other.state_dict())


def test_gradients_that_overflow_are_not_applied(model: nn.Linear) -> None:
    scaler, optimizer = scaled(model)
    before = copy.deepcopy(model.state_dict())
    scaler.backward(model(torch.full((1, 3), 1e38)).sum())
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before)
    optimizer.zero_grad()
    scale = scaler._scaler.get_scale()
    scaler.backward(model(torch.ones(1, 3)).sum())
    assert scaler._scaler.get_scale() == scale / 2  # and the next loss is scaled by less
    optimizer.step()
    torch.testing.assert_close(model.weight, before["weight"] - 0.1)


def test_optimizers_of_one_loss_see_one_scale() -> None:
    """Brought up to date after the first step, the scale would be another one for the second."""
    torch.manual_seed(0)
    parts = [nn.Linear(3, 3), nn.Linear(3, 1)]
    before = [copy.deepcopy(part.state_dict()) for part in parts]
    scaler, first = scaled(parts[0])
    second = ScaledOptimizer(torch.optim.SGD(parts[1].parameters(), lr=0.1), scaler)
    scaler._scaler.set_growth_interval(1)  # another scale after every step
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        scaler.backward(parts[1](parts[0](torch.ones(1, 3))).sum())
        gradient = parts[1].weight.grad / scaler._scaler.get_scale()
        weight = parts[1].weight.detach().clone()
        first.step()
        second.step()
        torch.testing.assert_close(parts[1].weight.detach(), weight - 0.1 * gradient)
    assert not torch.equal(parts[0].weight, before[0]["weight"])


def test_a_step_without_our_backward_is_an_error(model: nn.Linear) -> None:
    scaler, optimizer = scaled(model)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"without a distrain\.torch\.backward\(loss\)"):
        optimizer.step()
    optimizer.zero_grad()
    scaler.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"since the last one"):
        optimizer.step()


def test_a_scaled_optimizer_is_an_optimizer(model: nn.Linear) -> None:
    scaler, optimizer = scaled(model, momentum=0.9)
    inner = optimizer._optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert "SGD" in repr(optimizer)
    extra = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert inner.param_groups[1]["lr"] == 0.5
    steps: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))

    scaler.backward(model(torch.ones(1, 3)).sum() * extra)
    optimizer.step()
    assert steps == [1]
    state = optimizer.state_dict()
    assert state["state"].keys() == {0, 1, 2}
    optimizer.zero_grad()
    assert model.weight.grad is None

    _, other = scaled(model, momentum=0.9)
    other.add_param_group({"params": [extra]})
    other.load_state_dict(state)
    assert other._optimizer.param_groups[1]["lr"] == 0.5
    assert torch.equal(other.state[model.weight]["momentum_buffer"], inner.state[model.weight]["momentum_buffer"])
    for again in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(again) is torch.optim.SGD
        assert again.param_groups[1]["lr"] == 0.5


class Own(torch.optim.SGD):
    """An optimizer that keeps its state in its own way, as ZeroRedundancyOptimizer does."""

    def state_dict(self) -> dict[str, Any]:
        return {"mine": len(self.param_groups)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["mine"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({**param_group, "mine": True})

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed = set_to_none


def test_an_optimizers_own_ways_are_kept(model: nn.Linear) -> None:
    inner = Own(model.parameters(), lr=0.1)
    optimizer = ScaledOptimizer(inner, LossScaler("cpu"))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert inner.param_groups[1]["mine"]
    assert optimizer.state_dict() == {"mine": 2}
    optimizer.load_state_dict({"mine": 5})
    assert optimizer.loaded == inner.loaded == 5
    optimizer.zero_grad(set_to_none=False)
    assert inner.zeroed is False


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ],
)
def test_schedulers_take_a_scaled_optimizer(model: nn.Linear, make: Callable[[Any], Any]) -> None:
    scaler, optimizer = scaled(model, momentum=0.9)
    scheduler = make(optimizer)
    before = model.weight.detach().clone()
    for _ in range(2):
        scaler.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        scheduler.step(*[1.0] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))
    assert optimizer.param_groups[0]["lr"] == optimizer._optimizer.param_groups[0]["lr"]
    assert not torch.equal(model.weight, before)


# -- in workers --------------------------------------------------------------------------------------------------------


def train_with_amp(config: dict[str, Any]) -> dict[str, Any]:
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
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
        x = torch.linspace(-1, 1, 24, device=get_device()).reshape(6, 4)
        losses[str(strategy)] = []
        for _ in range(10):
            loss = nn.functional.cross_entropy(model(x), torch.tensor([0, 0, 1, 1, 2, 2], device=get_device()))
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            scheduler.step()
            losses[str(strategy)].append(loss.item())
        losses["seen"] = sorted(set(seen))
    distrain.report(losses)
    return losses


@shards_on_cpu
def test_the_three_calls_train_under_every_strategy(storage: Path) -> None:
    result = TorchTrainer(
        train_with_amp,
        scaling_config=distrain.ScalingConfig(num_workers=2),
        run_config=distrain.RunConfig(storage_path=storage),
    ).fit()
    lines = [json.loads(line) for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        losses = line["metrics"]
        assert losses["seen"] == ["torch.bfloat16"]
        assert losses["ddp"][-1] < 0.5 * losses["ddp"][0]
        assert losses["fsdp"] == pytest.approx(losses["ddp"], rel=0.05)
        assert losses["None"] == pytest.approx(losses["ddp"], rel=0.05)


@shards_on_cpu
def test_a_scaled_loss_trains_a_sharded_model(storage: Path) -> None:
    """With gradients in parts on several ranks; those that overflow on one rank are applied on none."""

    def train() -> list[Any]:
        rank = distrain.get_context().get_world_rank()
        weights = {}
        for kind in ("scaled", "plain"):
            torch.manual_seed(0)
            model = prepare_model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), parallel_strategy="fsdp")
            scaler, optimizer = scaled(model)
            for step in range(3):
                factor = 1e38 if step == 1 and rank == 1 else 1.0
                if kind == "scaled":
                    optimizer.zero_grad()
                    scaler.backward(factor * model(torch.ones(2, 4)).sum())
                    optimizer.step()
                elif step != 1:
                    optimizer.zero_grad()
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer._optimizer.step()
            weights[kind] = [parameter.full_tensor().flatten() for parameter in model.parameters()]
        torch.testing.assert_close(weights["scaled"], weights["plain"])
        return torch.cat(weights["scaled"]).tolist()

    result = TorchTrainer(
        train,
        scaling_config=distrain.ScalingConfig(num_workers=2),
        run_config=distrain.RunConfig(storage_path=storage),
    ).fit()
    assert result.return_value is not None


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu(2))])
def test_the_three_calls_train_on_gpus(storage: Path, workers: int) -> None:
    losses = (
        TorchTrainer(
            train_with_amp,
            scaling_config=distrain.ScalingConfig(num_workers=workers, use_gpu=True),
            run_config=distrain.RunConfig(storage_path=storage),
        )
        .fit()
        .return_value
    )
    assert losses["seen"] == ["torch.float16"]
    assert losses["ddp"][-1] < 0.5 * losses["ddp"][0]
    assert losses["fsdp"] == pytest.approx(losses["ddp"], rel=0.05)

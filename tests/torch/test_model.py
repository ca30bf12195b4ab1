"""prepare_model: the device, DistributedDataParallel and FSDP2, on the CPU with real processes."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import cloudpickle
import pytest
import torch
from torch import nn

import distrain
from distrain.api import current
from distrain.torch import TorchCheckpoint, get_device, get_devices, prepare_model
from tests.torch.ranks import acting_as, run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

sampled = pytest.mark.sample(2, of="sharded models")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


shards_on_cpu = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 is for GPUs only")


@pytest.fixture
def lone_worker() -> Iterator[None]:
    """This process is a run's only worker, as far as the public functions can tell."""
    with acting_as(0, 1):
        yield


# -- which model comes back --------------------------------------------------------------------------------------------


def prepared_models() -> None:
    """Report what became of models."""
    frozen = nn.Linear(2, 2).requires_grad_(False)
    model = nn.Linear(2, 2)
    prepared = prepare_model(model)
    options = prepare_model(nn.Linear(2, 2), parallel_strategy_kwargs={"find_unused_parameters": True})
    left = prepare_model(nn.Linear(2, 2, device="meta"), move_to_device=False, parallel_strategy=None)
    distrain.report(
        {
            "default": type(prepared).__name__,
            "same weights": getattr(prepared, "module", prepared) is model,
            "strategy None": type(prepare_model(nn.Linear(2, 2), parallel_strategy=None)).__name__,
            "frozen": type(prepare_model(frozen)).__name__,
            "find_unused_parameters": getattr(options, "find_unused_parameters", None),
            "moved to": str(next(prepare_model(nn.Linear(2, 2), torch.device("meta"), None).parameters()).device),
            "moved by name": str(next(prepare_model(nn.Linear(2, 2), "meta", None).parameters()).device),
            "left": str(next(left.parameters()).device),
            "devices": [str(get_device()), *map(str, get_devices())],
        }
    )


@sampled
@pytest.mark.parametrize("workers", [1, 2])
def test_prepare_model_shares_what_has_gradients_to_share(storage: Path, workers: int) -> None:
    expected = {
        "default": "DistributedDataParallel" if workers > 1 else "Linear",
        "same weights": True,
        "strategy None": "Linear",
        "frozen": "Linear",
        "find_unused_parameters": True if workers > 1 else None,
        "moved to": "meta",
        "moved by name": "meta",
        "left": "meta",
        "devices": ["cpu", "cpu"],
    }
    assert run_on_ranks(prepared_models, storage, workers=workers) == [expected] * workers


@pytest.mark.usefixtures("lone_worker")
def test_what_cannot_be_meant_is_refused_with_any_number_of_workers() -> None:
    with pytest.raises(ValueError, match='must be "ddp", "fsdp" or None, got \'horovod\''):
        prepare_model(nn.Linear(2, 2), parallel_strategy="horovod")
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got list"):
        prepare_model([nn.Linear(2, 2)])  # type: ignore[arg-type]


@pytest.mark.usefixtures("lone_worker")
def test_a_lone_worker_shards_nothing() -> None:
    model = nn.Linear(2, 2)
    assert prepare_model(model, parallel_strategy="fsdp") is model
    assert type(model) is nn.Linear


def test_a_torch_that_cannot_shard_on_the_cpu_is_named(monkeypatch: pytest.MonkeyPatch, lone_worker: None) -> None:
    monkeypatch.setattr(torch.cpu, "Stream", object)
    session = current.session
    assert session is not None
    session.context = replace(session.context, world_size=2)
    with pytest.raises(RuntimeError, match=r"torch \d\S+ shards on GPUs only"):
        prepare_model(nn.Linear(2, 2), parallel_strategy="fsdp")


def test_outside_of_a_worker_it_says_where_it_belongs() -> None:
    with pytest.raises(RuntimeError, match=r"distrain\.torch\.prepare_model\(\) only works inside a worker"):
        prepare_model(nn.Linear(2, 2))


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.register_buffer("mask", (torch.rand(8, 2) > 0.3)[:, 0])  # not contiguous

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.steps(x) * self.mask


class Transformer(nn.Module):
    """Of the usual shape: an embedding whose weights are also those of the head, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(), nn.ModuleList([Block(), Block()])])
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.tied[1].weight = self.tied[0].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for block in (self.blocks[0], *self.blocks[1]):
            x = block(x)
        logits: torch.Tensor = self.head(self.tied(x))
        return logits


def tokens_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(40).reshape(8, 5) * 7 % 10
    return tokens, (tokens * 3 + 1) % 10


def losses_of(model: nn.Module, share: slice) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens, labels = tokens_and_labels()
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(tokens[share]).flatten(0, 1), labels[share].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@sampled
@shards_on_cpu
def test_fsdp_trains_as_ddp_does_and_as_one_process_would(storage: Path) -> None:
    def train() -> None:
        from torch import distributed as dist
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        rank = dist.get_rank()
        share = slice(rank, None, 2)
        weights, losses = {}, {}
        for strategy in ("ddp", "fsdp"):
            torch.manual_seed(rank)  # the ranks draw other weights and masks: those of rank 0 are to count
            model = prepare_model(Transformer(), parallel_strategy=strategy)
            means = torch.stack(losses_of(model, share))
            dist.all_reduce(means)
            losses[strategy] = (means / 2).tolist()
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights[strategy] = get_model_state_dict(model, options=options)
        if rank == 0:
            assert weights["ddp"].keys() == weights["fsdp"].keys()
            torch.testing.assert_close(weights["fsdp"], weights["ddp"], rtol=1e-4, atol=1e-5)
        else:
            assert not weights["fsdp"]
        with pytest.raises(ValueError, match="full_state_dict=True"):
            TorchCheckpoint.from_model(model)
        distrain.report(
            {
                "losses": losses,
                "groups": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
                "sharded": all(isinstance(value, DTensor) for value in model.parameters()),
            }
        )

    torch.manual_seed(0)
    expected = [loss.item() for loss in losses_of(Transformer(), slice(None))]
    assert expected[-1] < expected[0]
    for rank in run_on_ranks(train, storage):
        assert rank["losses"]["ddp"] == pytest.approx(expected, rel=1e-4)
        assert rank["losses"]["fsdp"] == pytest.approx(expected, rel=1e-4)
        assert rank["groups"] == ["", "blocks.0", "blocks.1.0", "blocks.1.1"]  # and not those with tied weights
        assert rank["sharded"]


@sampled
@shards_on_cpu
def test_fully_shard_gets_its_options_and_what_is_sharded_stays(storage: Path) -> None:
    def train() -> None:
        from torch import distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        lower = prepare_model(Block(), parallel_strategy="fsdp", parallel_strategy_kwargs={"mp_policy": policy})
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        own = nn.Sequential(Block(), nn.Linear(8, 8))
        fully_shard(own[0].steps[0], mesh=mesh)
        prepare_model(own, parallel_strategy="fsdp", parallel_strategy_kwargs={"mesh": mesh})
        again = prepare_model(own, parallel_strategy="fsdp")
        frozen = prepare_model(nn.Linear(8, 8).requires_grad_(False), parallel_strategy="fsdp")
        with pytest.raises(TypeError, match="find_unused_parameters"):
            prepare_model(
                nn.Linear(8, 8), parallel_strategy="fsdp", parallel_strategy_kwargs={"find_unused_parameters": True}
            )
        distrain.report(
            {
                "computed in": str(lower(torch.ones(1, 8)).dtype),
                "kept in": str(next(lower.parameters()).dtype),
                "groups": [name for name, module in own.named_modules() if isinstance(module, FSDPModule)],
                "shape": list(own(torch.ones(3, 8)).shape),
                "again": again is own,
                "frozen": isinstance(frozen, FSDPModule),
            }
        )

    expected = {
        "computed in": "torch.bfloat16",
        "kept in": "torch.float32",
        "groups": ["", "0", "0.steps.0", "1"],
        "shape": [3, 8],
        "again": True,
        "frozen": True,
    }
    assert run_on_ranks(train, storage) == [expected] * 2

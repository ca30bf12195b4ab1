"""Replicas that drift apart are named at the next check, whatever bit of them differs; equal ones are not."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import distrain
from distrain import FailureConfig, RunConfig, ScalingConfig
from distrain.storage.lines import read_events
from distrain.storage.paths import RunPaths
from distrain.torch import TorchTrainer, prepare_model
from tests.tables import SEED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SILENCE = "FailureConfig.on_divergence compares nothing: "
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mixed(nn.Module):
    """Parameters of several types and of odd sizes, one of them not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(6, 4))
        self.odd = nn.Parameter(torch.randn(7, 3))
        self.columns = nn.Parameter(torch.randn(6, 5).t())
        self.doubles = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.halves = nn.Parameter(torch.randn(3, 3).bfloat16())


def flip(parameter: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of a parameter, in place. Twice does nothing."""
    flat = parameter.detach().t().reshape(-1) if not parameter.is_contiguous() else parameter.detach().view(-1)
    words = flat.view(INTEGERS[flat.element_size()])
    mask = 1 << bit
    words[element] ^= mask - (1 << 8 * flat.element_size()) if bit == 8 * flat.element_size() - 1 else mask


def flips(seed: str, ranks: int, number: int) -> list[tuple[int, str, int, int]]:
    """Return random flips: the rank, the parameter, its element and the bit."""
    dice, cases = random.Random(seed), []
    named = dict(Mixed().named_parameters())
    for _ in range(number):
        name = dice.choice([*named])
        bits = 8 * named[name].element_size()
        cases.append((dice.randrange(ranks), name, dice.randrange(named[name].numel()), dice.randrange(bits)))
    return cases


def disturbed(config: dict[str, Any]) -> None:
    """Flip a bit of a replica, report, flip it back, and report twice."""
    model = DistributedDataParallel(Mixed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rank, name, element, bit in config["flips"]:
        for is_flip in (True, True, False):
            if is_flip and distrain.get_context().get_world_rank() == rank:
                flip(model.module.get_parameter(name), element, bit)
            optimizer.step()  # there are no gradients, so it changes nothing
            distrain.report({})
            distributed.barrier()


def fit(
    train: Callable[..., Any],
    storage: Path,
    workers: int,
    failures: FailureConfig,
    config: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return what the events of the run say about troubles and rollbacks."""
    run = RunConfig(name="run", storage_path=storage, failure_config=failures)
    scaling = ScalingConfig(num_workers=workers)
    TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    return [one for one in read_events(RunPaths(storage / "run").events) if one["event"] != "checkpoint"]


@pytest.mark.parametrize("number", [6, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_flipped_bit_of_any_rank_is_named_at_the_next_report(storage: Path, workers: int, number: int) -> None:
    """Of two ranks, both are. Without the bit, none is."""
    cases = flips(f"{SEED} {workers}", workers, number)
    failures = FailureConfig(on_divergence="warn", divergence_every=1)
    events = fit(disturbed, storage, workers, failures, {"flips": cases})
    for index, (rank, name, _, _) in enumerate(cases):
        culprits = [rank] if workers == 3 else [0, 1]
        begun, over = (events[(2 * index + half) * len(culprits) :][: len(culprits)] for half in (0, 1))
        which = " from those of the other 2 ranks" if workers == 3 else ""
        text = f"parameters differ{which} in report {3 * index + 1}, first in {name}"
        assert [(one["event"], one["rank"], one["text"]) for one in begun] == [
            ("trouble", one, text) for one in culprits
        ]
        assert [(one["event"], one["rank"]) for one in over] == [("trouble_over", one) for one in culprits]
    assert len(events) == 2 * len(cases) * (1 if workers == 3 else 2)


def drifts(config: dict[str, Any]) -> None:
    """Train a model. One rank adds to its own copy, in the first attempt."""
    context = distrain.get_context()
    torch.manual_seed(0)
    model = prepare_model(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = 0
    if checkpoint := distrain.get_checkpoint():
        first = checkpoint.to_dict()["step"]
        model.module.load_state_dict(checkpoint.to_dict()["model"])
    for step in range(first, 12):
        model(torch.ones(2, 4) * context.get_world_rank()).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step, context.get_world_rank(), context.attempt) == (7, config["rank"], 0):
            with torch.no_grad():
                next(model.parameters()).add_(1)
        state = {"step": step + 1, "model": {name: one.clone() for name, one in model.module.state_dict().items()}}
        total = sum(one.detach().double().sum().item() for one in model.parameters())
        distrain.report({"sum": total}, distrain.Checkpoint.from_dict(state) if step % 3 == 0 else None)


def test_a_rollback_takes_all_ranks_back_to_equal_parameters(storage: Path) -> None:
    sums = []
    for name, rank in (("drifts", 1), ("stays", -1)):
        failures = FailureConfig(on_divergence="rollback", divergence_every=2, max_rollbacks=1)
        events = fit(drifts, storage / name, 3, failures, {"rank": rank})
        sums.append(distrain.Result.from_path(storage / name / "run").metrics)
        if name == "drifts":
            [event] = events
            assert event["event"] == "rollback"
            assert (
                event["why"] == "rank 1: parameters differ from those of the other 2 ranks in report 8, first in weight"
            )
        else:
            assert events == []
    assert sums[0] == sums[1]


def trains_without_replicas(config: dict[str, Any]) -> None:
    """Each rank has a model of its own."""
    _train(nn.Linear(2, 2))


def only_rank_zero_reports(config: dict[str, Any]) -> None:
    _train(DistributedDataParallel(nn.Linear(2, 2)), reporting=distrain.get_context().get_world_rank() == 0)


def ranks_report_at_other_steps(config: dict[str, Any]) -> None:
    """Rank 1 reports before each step, rank 0 after it."""
    _train(DistributedDataParallel(nn.Linear(2, 2)), late=distrain.get_context().get_world_rank())


def _train(model: nn.Module, *, reporting: bool = True, late: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + torch.distributed.get_rank()))
    for _ in range(late):
        optimizer.step()
    for _ in range(6):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if reporting:
            distrain.report({})
    distributed.barrier()


@pytest.mark.parametrize(
    ("train", "why"),
    [
        (trains_without_replicas, "no parameters are replicated"),
        (only_rank_zero_reports, "ranks report after different optimizer steps"),
        (ranks_report_at_other_steps, "ranks report after different optimizer steps"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_compared_is_said_once(
    train: Callable[..., Any], why: str, storage: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failures = FailureConfig(on_divergence="rollback", divergence_every=1)
    assert fit(train, storage, 2, failures) == []
    output = capfd.readouterr()
    lines = [line for line in (output.out + output.err).splitlines() if SILENCE in line]
    assert len(lines) == 1, lines
    assert lines[0].endswith(why)


def shards_in_replicas(config: dict[str, Any]) -> None:
    """Two groups of two ranks, which have the same halves of a model."""
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = prepare_model(nn.Linear(4, 4), parallel_strategy="fsdp", parallel_strategy_kwargs={"mesh": mesh})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step == 2 and distrain.get_context().get_world_rank() == 3:
            with torch.no_grad():
                next(model.parameters()).to_local().add_(1)
        distrain.report({})
    distributed.barrier()


def test_replicas_of_shards_are_compared_with_each_other(storage: Path) -> None:
    events = fit(shards_in_replicas, storage, 4, FailureConfig(on_divergence="warn", divergence_every=1))
    text = "parameters differ in report 3, first in parameter 0 of the optimizers"
    assert [(one["rank"], one["text"]) for one in events] == [(1, text), (3, text)]

"""The comparison of ranks, on what they would note for data divided in many ways."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from distrain.drilling.journal import Attempt
from distrain.drilling.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Division = Callable[[random.Random, int, int], Sequence[Sequence[int]]]
    """Returns the rows of each rank, of so many ranks and rows, in one pass over the data."""


def attempt(
    passes: Sequence[Sequence[Sequence[int]]],
    batch: int,
    *,
    by_index: bool = True,
    has_loader: bool = True,
    epochs: Sequence[Sequence[int]] = (),
) -> Attempt:
    """An attempt in which each rank has read its rows of each pass. epochs: those of a sampler, by pass and rank."""
    notes: dict[int, list[dict[str, Any]]] = {}
    for rank in range(len(passes[0])):
        step = 0
        for number, one in enumerate(passes):
            mine = one[rank]
            for first in range(0, len(mine), batch):
                rows = [str(row) for row in mine[first : first + batch]]
                note = {"what": "rows", "step": step, "share": "all", "joined": False, "rows": rows}
                if has_loader:
                    note["pass"] = number
                note |= {
                    "site": "train.py:3",
                    "sampler": {"epoch": epochs[number][rank], "shuffle": True, "num_replicas": 3} if epochs else {},
                    "index": [f"d:{row}" for row in rows] if by_index else None,
                }
                values = {"parameters": {"weight|all": [float(step), 1.0]}}
                replicas = {"what": "replicas", "step": step, "values": values, "made": {"weight": "train.py:1"}}
                notes.setdefault(rank, []).extend((note, replicas))
                step += 1
    return Attempt(notes=notes)


def sampler(draw: random.Random, ranks: int, size: int) -> Sequence[Sequence[int]]:
    """Divide as DistributedSampler does, which fills up with the first rows."""
    order = draw.sample(range(size), size)
    order += order[: -size % ranks]
    return [order[rank::ranks] for rank in range(ranks)]


def contiguous(draw: random.Random, ranks: int, size: int) -> Sequence[Sequence[int]]:
    return [range(size * rank // ranks, size * (rank + 1) // ranks)[: size // ranks] for rank in range(ranks)]


def replacement(draw: random.Random, ranks: int, size: int) -> Sequence[Sequence[int]]:
    return [[draw.randrange(size) for _ in range(size // ranks)] for _ in range(ranks)]


def repetitive(draw: random.Random, ranks: int, size: int) -> Sequence[Sequence[int]]:
    """Divide data of which most rows are there several times."""
    return [[row % (size // 3) for row in share] for share in sampler(draw, ranks, size)]


def one_order(draw: random.Random, ranks: int, size: int) -> Sequence[Sequence[int]]:
    return [draw.sample(range(size), size)] * ranks


def own_orders(draw: random.Random, ranks: int, size: int) -> Sequence[Sequence[int]]:
    return [draw.sample(range(size), size) for _ in range(ranks)]


def own_seeds(draw: random.Random, ranks: int, size: int) -> Sequence[Sequence[int]]:
    return [draw.sample(range(size), size)[: size // ranks] for _ in range(ranks)]


def one_rank_twice(draw: random.Random, ranks: int, size: int) -> Sequence[Sequence[int]]:
    divided = list(sampler(draw, ranks, size))
    return [*divided[:-1], divided[0]]


def same_draws(draw: random.Random, ranks: int, size: int) -> Sequence[Sequence[int]]:
    return [[draw.randrange(size) for _ in range(size // ranks)]] * ranks


def found(divide: Division, seed: int) -> list[str]:
    """The causes in a run with a random number of ranks, rows and passes, which may have been stopped."""
    draw = random.Random(seed)
    ranks, size, batch = draw.randint(2, 5), draw.randint(120, 300), draw.randint(2, 8)
    passes = [divide(draw, ranks, size) for _ in range(draw.randint(1, 3))]
    has_loader = draw.random() < 0.6 or divide is own_seeds
    seen = attempt(passes, batch, by_index=has_loader and draw.random() < 0.5, has_loader=has_loader)
    return [cause.name for cause in Ranks(seen, has_finished=draw.random() < 0.5).faults()]


@pytest.mark.parametrize("divide", [sampler, contiguous, replacement, repetitive])
def test_data_that_are_divided_cause_no_alarm(divide: Division) -> None:
    assert {seed: causes for seed in range(100) if (causes := found(divide, seed))} == {}


@pytest.mark.parametrize("divide", [one_order, own_orders, own_seeds, one_rank_twice, same_draws])
def test_data_that_several_ranks_read_are_found(divide: Division) -> None:
    assert {seed: causes for seed in range(100) if (causes := found(divide, seed)) != ["same-rows"]} == {}


@pytest.mark.parametrize("divide", [one_order, own_orders, own_seeds, one_rank_twice, same_draws])
def test_data_that_several_ranks_read_only_in_a_later_pass_are_found(divide: Division) -> None:
    draw = random.Random(0)
    passes = [(divide if number == 1 else sampler)(draw, 3, 200) for number in range(3)]
    causes = Ranks(attempt(passes, 4), has_finished=True).faults()
    assert [cause.name for cause in causes] == ["same-rows"]


@pytest.mark.parametrize(
    ("epochs", "evidence"),
    [
        ([[0, 0, 0], [1, 0, 1]], "only ranks 0, 2 called set_epoch() (train.py:3)"),
        ([[0, 0, 0], [1, 0, 0]], "only rank 0 called set_epoch() (train.py:3)"),
        ([[0, 0, 0], [1, 1, 2]], "the sampler's epoch is 1 and 2 on ranks 0 and 2 (train.py:3)"),
        ([[0, 1, 0], [1, 2, 1]], "the sampler's epoch is 0 and 1 on ranks 0 and 1 (train.py:3)"),
    ],
)
def test_samplers_in_other_epochs_are_found_as_soon_as_a_pass_begins(epochs: list[list[int]], evidence: str) -> None:
    passes = [sampler(random.Random(0), 3, 120), [[row] for row in range(3)]]
    seen = Ranks(attempt(passes, 4, epochs=epochs), has_finished=False)
    assert [(cause.name, cause.evidence) for cause in seen.faults()] == [("sampler-seed", evidence)]
    assert seen.remarks() == []


def test_an_epoch_that_all_ranks_keep_is_a_remark() -> None:
    passes = [sampler(random.Random(0), 2, 120)] * 2
    seen = Ranks(attempt(passes, 4, epochs=[[0, 0], [0, 0]]), has_finished=True)
    assert seen.faults() == []
    assert "set_epoch() is never called" in seen.remarks()[0]


def test_constant_rows_prove_nothing() -> None:
    assert Ranks(attempt([[[0] * 40, [0] * 40]], 4, by_index=False), has_finished=True).faults() == []


def test_a_pass_with_fewer_batches_on_a_rank_is_found() -> None:
    passes = [[range(40), range(40, 76)]] * 2
    causes = Ranks(attempt(passes, 4), has_finished=True).faults()
    assert [(cause.name, cause.evidence) for cause in causes] == [
        ("uneven", "ranks 0 and 1 train on 10 and 9 batches in a pass over the data (train.py:3)")
    ]

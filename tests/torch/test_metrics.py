"""gather_for_metrics: each row of the data once, in the order of the data."""

from __future__ import annotations

import random
import sys
from collections import namedtuple
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

import distrain
from distrain.torch import gather_for_metrics, prepare_data_loader
from tests.torch.ranks import acting_as, run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

Pair = namedtuple("Pair", "rows names")


class Numbers(IterableDataset[int]):
    """A stream that divides itself: rank r has r + 1 numbers from 10 r on."""

    def __iter__(self) -> Iterator[int]:
        rank = distrain.get_context().get_world_rank()
        return iter(range(10 * rank, 11 * rank + 1))


class Whole(BatchSampler):
    """A batch sampler of the user's, which is divided by whole batches."""

    def __init__(self, sampler: BatchSampler) -> None:
        vars(self).update(vars(sampler))


def gathered(loader: DataLoader[Any]) -> list[int]:
    return [row for batch in loader for row in gather_for_metrics(batch).tolist()]


def check_random_sizes(seed: int, ranks: int) -> None:
    """Raise AssertionError unless rows come once each, and in order."""
    draw, rank = random.Random(seed), distrain.get_context().get_world_rank()
    for _ in range(8):
        size, batch, drop = draw.randint(1, 40), draw.randint(1, 9), draw.random() < 0.3
        case = f"{size} rows, batches of {batch}, {drop=}, {ranks} ranks"
        rows = list(range(size))
        mixed = prepare_data_loader(DataLoader(rows, batch_size=batch, shuffle=True, drop_last=drop))
        sampler = DistributedSampler(rows, num_replicas=ranks, rank=rank, shuffle=False)
        whole = BatchSampler(SequentialSampler(rows), batch, drop_last=False)
        for loader in (
            DataLoader(rows, batch_size=batch),
            DataLoader(rows, batch_size=batch, sampler=sampler),
            DataLoader(rows, batch_sampler=Whole(whole)),
        ):
            assert gathered(prepare_data_loader(loader)) == rows, case
        for _ in range(2):
            found = gathered(mixed)
            assert len({*found}) == len(found), case
            seen = size if not drop else min(size, -(-size // ranks) // batch * batch * ranks)
            assert len(found) == seen, case


def check_values() -> None:
    """Raise AssertionError unless every kind of value arrives, also in nested loops, and what cannot is refused."""
    rank, ranks = distrain.get_context().get_world_rank(), distrain.get_context().get_world_size()
    train = prepare_data_loader(DataLoader(range(4 * ranks), batch_size=4))
    validation = prepare_data_loader(DataLoader(range(5), batch_size=3))
    for batch in train:
        for rows in validation:
            kinds = [torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.uint8]
            values = {
                "pair": Pair(rows, [rows.to(kind) for kind in kinds]),
                "wide": rows[:, None, None].expand(-1, 2, 3),
            }
            found = gather_for_metrics(values)
            assert found["pair"].rows.tolist() == [0, 1, 2, 3, 4][: len(found["pair"].rows)]
            assert [each.dtype for each in found["pair"].names] == kinds
            assert found["pair"].names[2].tolist() == found["pair"].rows.tolist()
            assert found["wide"][:, 1, 2].tolist() == found["pair"].rows.tolist()
            grown = gather_for_metrics(torch.ones(len(rows), 2, requires_grad=True))
            assert not grown.requires_grad
        assert len(gather_for_metrics(batch)) == 4 * ranks  # the inner loop has ended
    assert gather_for_metrics(next(iter(validation))).tolist() == list(range(min(5, 3 * ranks)))
    stream = prepare_data_loader(DataLoader(Numbers(), batch_size=ranks))
    expected = [row for each in range(ranks) for row in range(10 * each, 11 * each + 1)]
    assert gathered(stream) == expected
    for rows in prepare_data_loader(DataLoader(range(2 * ranks), batch_size=2)):
        with pytest.raises(ValueError, match="different shapes"):
            gather_for_metrics(torch.zeros(len(rows), 1 + rank))


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_come_once_each_and_in_order(tmp_path: Path, ranks: int) -> None:
    def train() -> None:
        check_random_sizes(10 * ranks, ranks)
        check_values()
        distrain.report({"done": 1})

    assert run_on_ranks(train, tmp_path, workers=ranks) == [{"done": 1}] * ranks


@pytest.mark.parametrize(
    "values", [torch.tensor(1.0), torch.ones(3), [torch.ones(2), torch.ones(3)], 1.0, ["a", "b"], []]
)
def test_what_has_no_row_for_each_row_of_the_batch_is_refused(values: Any) -> None:
    with acting_as(0, 1):
        loader = prepare_data_loader(DataLoader(range(2), batch_size=2))
        with pytest.raises(ValueError, match="a loop over the result of prepare_data_loader"):
            gather_for_metrics(torch.ones(2))
        for _ in loader:
            assert len(gather_for_metrics(torch.ones(2))) == 2
            with pytest.raises(ValueError, match=r"a row for each of its rows.*got"):
                gather_for_metrics(values)
        with pytest.raises(ValueError, match="is called for each batch"):
            gather_for_metrics(torch.ones(2))
        for _ in prepare_data_loader(DataLoader(range(2), batch_size=2, in_order=False, num_workers=1)):
            with pytest.raises(ValueError, match="without in_order=False"):
                gather_for_metrics(torch.ones(2))

"""``distrain check --deep``: a bit that changes on its way from one rank to another is named, and nothing else."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed

from distrain import RunConfig, ScalingConfig
from distrain.torch import TorchTrainer, byte_check
from tests.tables import SEED

if TYPE_CHECKING:
    from pathlib import Path

WORKERS = 3
SIZES = byte_check._SIZES["cpu"]
UNDISTURBED = 10
"""Rounds without a changed bit, for each one with one."""


def rounds(config: dict[str, Any]) -> None:
    """Compare bytes in many rounds. In some, a bit changes on its way, after the sender has let go of it."""
    exchange = distributed.batch_isend_irecv
    for case in config["cases"]:
        distributed.batch_isend_irecv = exchange if case is None else Disturbance(exchange, case)
        byte_check.compare_bytes()
        distributed.barrier()


class Disturbance:
    """Flips one bit of one message. case: the sender, the receiver, the number of the message, the offset, the bit."""

    def __init__(self, exchange: Any, case: tuple[int, ...]) -> None:
        self.exchange, self.case, self.seen = exchange, case, 0

    def __call__(self, both: list[distributed.P2POp]) -> Any:
        sender, receiver, message, offset, bit = self.case
        [sent] = [one for one in both if one.op is distributed.isend]
        if (distributed.get_rank(), sent.peer) == (sender, receiver):
            if self.seen == message:
                sent.tensor = sent.tensor.clone()
                sent.tensor[offset] ^= 1 << bit
            self.seen += 1
        return self.exchange(both)


def case_of(dice: random.Random) -> tuple[int, ...]:
    sender, receiver = dice.sample(range(WORKERS), 2)
    message = dice.randrange(4 * len(SIZES))
    return sender, receiver, message, dice.randrange(SIZES[message % len(SIZES)]), dice.randrange(8)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_changed_bit_is_named_with_its_pair_and_place(storage: Path, number: int) -> None:
    dice = random.Random(SEED)
    cases = [case_of(dice) for _ in range(number)]
    every = [one for case in cases for one in (case, *[None] * UNDISTURBED)]
    TorchTrainer(
        rounds,
        train_loop_config={"cases": every},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(name="run", storage_path=storage),
    ).fit()
    reports = [json.loads(line) for line in (storage / "run" / "metrics.jsonl").read_text().splitlines()]
    for rank in range(WORKERS):
        last = [one["metrics"]["found"] for one in reports if one["rank"] == rank and not one["metrics"]["waiting"]]
        for case, found in zip(every, last, strict=True):
            if case is None or case[1] != rank:
                assert found == []
                continue
            sender, receiver, message, offset, bit = case
            [[source, target, text]] = found
            assert (source, target) == (sender, receiver)
            size = SIZES[message % len(SIZES)]
            beginning, _, values = text.partition(": ")
            assert beginning == f"1 of {size} bytes differ, first at offset {offset}"
            got, wanted = (int(value, 16) for value in values.split(" instead of "))
            assert got ^ wanted == 1 << bit


def test_every_bit_of_a_word_is_0_and_1_in_some_message() -> None:
    """A bit that is stuck is found. Messages of another sender differ."""
    words = [word for one in byte_check._patterns(0, (1 << 12,), "cpu") for word in one.view(torch.int64).tolist()]
    assert all({word >> bit & 1 for word in words} == {0, 1} for bit in range(64))
    first, second = (byte_check._patterns(sender, (1 << 12,), "cpu")[0] for sender in (0, 1))
    assert not torch.equal(first, second)

"""barrier() and broadcast_from_rank_zero() between real workers, when they meet and when they cannot."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import distrain
from distrain import CollectiveError, WorkerGroupError
from distrain.collective import barrier, broadcast_from_rank_zero
from tests.process.conftest import Fit, reported

LARGEST = 16 << 20


def failures(error: WorkerGroupError) -> dict[int, str]:
    return {rank: str(failure) for rank, failure in error.worker_failures.items()}


# -- they meet -------------------------------------------------------------------------------------------------------


def test_nobody_leaves_before_the_last_has_come_and_all_get_what_rank_0_has(any_fit: Fit) -> None:
    class Plan:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

    def train() -> None:
        rank = distrain.get_context().get_world_rank()
        if rank == 1:
            time.sleep(0.3)
        came = time.monotonic()
        barrier()
        left = time.monotonic()
        plan = broadcast_from_rank_zero(Plan(Path("/from", str(rank))))
        function = broadcast_from_rank_zero(lambda x: x + rank)
        distrain.report({"came": came, "left": left, "folder": str(plan.folder), "value": function(10)})

    metrics = reported(any_fit(train, workers=3).path)
    assert min(line["left"] for line in metrics) >= max(line["came"] for line in metrics)
    assert [(line["folder"], line["value"]) for line in metrics] == [("/from/0", 10)] * 3


# -- what cannot be sent ---------------------------------------------------------------------------------------------


def test_what_cannot_be_sent_is_refused_and_does_not_count(any_fit: Fit) -> None:
    """The other rank goes on waiting for its first collective, which a smaller one then is."""

    def train(config: dict[str, int]) -> list[str]:
        said = []
        if distrain.get_context().get_world_rank() == 0:
            for data in (bytes(config["largest"]), threading.Lock()):
                try:
                    broadcast_from_rank_zero(data)
                except (ValueError, TypeError) as error:
                    said.append(f"{type(error).__name__}: {error}")
        size = len(broadcast_from_rank_zero(b"x" * (config["largest"] - 100)))
        distrain.report({"size": size})
        return said

    result = any_fit(train, {"largest": LARGEST})
    too_large, unpicklable = result.return_value
    assert too_large.startswith("ValueError: broadcast_from_rank_zero(): the data is 16,777,2")
    assert "16,777,216 are allowed; use torch.distributed" in too_large
    assert unpicklable.startswith("TypeError")
    assert reported(result.path) == [{"size": LARGEST - 100}] * 2


# -- they cannot meet ------------------------------------------------------------------------------------------------


def test_ranks_that_mix_up_their_calls_are_named(any_fit: Fit) -> None:
    def train() -> None:
        barrier()
        if distrain.get_context().get_world_rank() == 1:
            broadcast_from_rank_zero(1)
        else:
            barrier()

    with pytest.raises(WorkerGroupError, match="is not the same collective on all ranks") as raised:
        any_fit(train, workers=3)
    assert all(type(error) is CollectiveError for error in raised.value.worker_failures.values())
    first = failures(raised.value)[raised.value.culprit]
    assert "called barrier()" in first
    assert "rank 1 called broadcast_from_rank_zero()" in first
    assert "call number 2" in first


def test_a_rank_that_has_finished_is_named(any_fit: Fit) -> None:
    def train() -> None:
        if distrain.get_context().get_world_rank() != 2:
            barrier()

    with pytest.raises(WorkerGroupError, match=r"rank 2 finished train_func without calling barrier\(\)") as raised:
        any_fit(train, workers=3)
    assert raised.value.culprit in (0, 1)
    assert "every rank must call it" in str(raised.value)

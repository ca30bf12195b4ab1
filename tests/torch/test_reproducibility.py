"""enable_reproducibility: the same random numbers in every run, in workers and in the workers of their data loaders."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch

import distrain
from distrain.torch import enable_reproducibility, prepare_data_loader
from tests.torch.ranks import fit, last_by_rank

if TYPE_CHECKING:
    from pathlib import Path

sampled = pytest.mark.sample(1, of="equal numbers")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def drawn() -> list[float]:
    """Numbers from everywhere."""
    import random

    import numpy

    return [random.random(), float(numpy.random.rand()), torch.rand(1).item()]


class Draws(torch.utils.data.Dataset[Any]):
    """Items are random, and say which of the loader's workers drew them."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return {"index": index, "worker": info.id, "drawn": drawn(), "called": getattr(info.dataset, "called", None)}


def draw(config: dict[str, Any]) -> None:
    import os

    from torch.backends import cudnn

    def mark(worker: int) -> None:
        torch.utils.data.get_worker_info().dataset.called = worker

    if config["seed"] is not None:
        enable_reproducibility(config["seed"])
    else:
        torch.manual_seed(5 + distrain.get_context().get_world_rank())
    loader = prepare_data_loader(
        torch.utils.data.DataLoader(
            Draws(), batch_size=2, shuffle=True, num_workers=2, worker_init_fn=mark, collate_fn=list
        )
    )
    epochs = [[item for batch in loader for item in batch] for _ in range(2)]
    distrain.report(
        {
            "epochs": epochs,
            "own": drawn(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "benchmark": cudnn.benchmark,
            "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        }
    )


def run(storage: Path, seed: int | None) -> list[dict[str, Any]]:
    last = last_by_rank(fit(draw, storage, config={"seed": seed}))
    return [last[rank] for rank in sorted(last)]


@sampled
def test_runs_draw_the_same_numbers_and_loader_workers_different_ones(storage: Path) -> None:
    first, second, other, unseeded = (run(storage, seed) for seed in (7, 7, 8, None))
    assert first == second
    orders = [[item["index"] for item in made[0]["epochs"][0]] for made in (first, other)]
    assert orders[0] != orders[1], "the seed decides the order, too"
    settings = [(rank["deterministic"], rank["benchmark"], rank["cublas"]) for rank in first]
    assert settings == [(True, False, ":4096:8")] * 2
    assert first[0]["own"] == first[1]["own"]  # ranks are seeded alike, as by Ray
    items = [item for rank in first for epoch in rank["epochs"] for item in epoch]
    assert {item["worker"] for item in items} == {0, 1}
    assert all(item["called"] == item["worker"] for item in items)  # the user's worker_init_fn
    for source in range(3):  # no two alike: over ranks, loader workers, epochs
        assert len({item["drawn"][source] for item in items}) == len(items) == 2 * 2 * 8

    assert not unseeded[0]["deterministic"]
    indices = [[item["index"] for rank in unseeded for item in rank["epochs"][epoch]] for epoch in range(2)]
    assert [sorted(epoch) for epoch in indices] == [[*range(16)]] * 2, "ranks of different seeds share one order"
    assert unseeded[0]["own"] != first[0]["own"]
    assert unseeded[0]["epochs"][0][0]["drawn"] != first[0]["epochs"][0][0]["drawn"]

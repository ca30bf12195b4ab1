"""Positions in the data, which any framework may store: from the ranks into a checkpoint, and to those that resume."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import distrain
from distrain.api import current
from distrain.collective import barrier
from distrain.coordinator.run.trainer import DataParallelTrainer
from distrain.storage.checkpoint import POSITIONS, Checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def train() -> dict[int, int]:
    session, context = current.session, distrain.get_context()
    assert session is not None
    start = session.positions_at_start("train")
    steps = [0]
    session.positions["train"] = lambda: {"step": steps[0], "of": min(context.get_world_rank(), 2)}
    if not start:
        for _ in range(2):
            steps[0] += 1
            distrain.report({}, Checkpoint.from_dict({"x": 1}))
            distrain.report({})
        barrier()  # a slow rank has brought its checkpoints, too
        os.kill(os.getpid(), signal.SIGKILL)
    return {rank: position["step"] for rank, position in start.items()}


def test_positions_travel_with_the_checkpoint(storage: Path) -> None:
    result = DataParallelTrainer(
        train,
        scaling_config=distrain.ScalingConfig(num_workers=4),
        run_config=distrain.RunConfig(storage_path=storage, failure_config=distrain.FailureConfig(max_failures=1)),
    ).fit()
    assert result.return_value == {0: 2, 1: 2, 2: 2}
    assert result.checkpoint is not None
    stored = result.checkpoint.get_metadata()[POSITIONS]
    assert stored == {"train": {str(rank): {"step": 2, "of": rank} for rank in range(3)}}

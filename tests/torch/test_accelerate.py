"""accelerate in real workers, on the CPU: nothing of ours is involved but the processes and the checkpoints."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import distrain
from distrain.torch import TorchTrainer

of_libraries = pytest.mark.sample(2, of="libraries on torch")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def train_with_a_failure(config: dict[str, Any]) -> None:
    """Four epochs with accelerate's own states; in the first attempt rank 1 dies at the beginning of the third."""
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator()
    context = distrain.get_context()
    assert (accelerator.process_index, accelerator.num_processes) == (context.get_world_rank(), 2)
    torch.manual_seed(0)
    features = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(features, features.sum(dim=1, keepdim=True)), batch_size=8)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert len(loader) == 4

    first = 0
    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            accelerator.load_state(folder)
        first = checkpoint.get_metadata()["epoch"] + 1
    for epoch in range(first, 4):
        if epoch == 2 and accelerator.process_index == 1 and not os.path.exists(config["died"]):
            Path(config["died"]).touch()
            os._exit(7)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        mean = accelerator.reduce(loss.detach(), "mean")
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
            checkpoint = distrain.Checkpoint.from_directory(folder)
            checkpoint.set_metadata({"epoch": epoch})
            distrain.report({"epoch": epoch, "loss": mean}, checkpoint=checkpoint)


@of_libraries
def test_a_run_goes_on_after_its_last_epoch_when_a_rank_has_died(storage: Path, tmp_path: Path) -> None:
    result = TorchTrainer(
        train_with_a_failure,
        train_loop_config={"died": str(tmp_path / "died")},
        scaling_config=distrain.ScalingConfig(num_workers=2),
        run_config=distrain.RunConfig(storage_path=storage, failure_config=distrain.FailureConfig(max_failures=1)),
    ).fit()
    assert (tmp_path / "died").exists()
    lines = [json.loads(line) for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines()]
    found = sorted((line["rank"], line["attempt"], line["metrics"]["epoch"]) for line in lines)
    assert found == [(rank, epoch // 2, epoch) for rank in (0, 1) for epoch in range(4)]
    losses = [line["metrics"]["loss"] for line in lines if line["rank"] == 0]
    assert losses[-1] < 0.5 * losses[0]
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        # each rank has brought its own random state, and the first of them what all have in common
        assert {"model.safetensors", "random_states_0.pkl", "random_states_1.pkl"} <= set(os.listdir(folder))

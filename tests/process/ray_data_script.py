"""A script of Ray Train and Ray Data, as its users write it. ``python ray_data_script.py FOLDER``.

Each checkpoint has the ids that the ranks have trained on. Rank 1 fails once, in the middle of the epoch.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

if TYPE_CHECKING:
    import numpy as np


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        batch["y"] = batch["y"] * self.factor
        return batch


def train_func(config: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    before = ray.train.get_checkpoint()
    seen = []
    if before is not None and rank == 0:
        with before.as_directory() as folder:
            seen = [row for file in Path(folder).glob("rank-*.json") for row in json.loads(file.read_text())]
    valid = ray.train.get_dataset_shard("valid")
    for batch in ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=4, dtypes=torch.float32):
        assert batch["x"].dtype == torch.float32
        seen += [[int(place), float(y)] for place, y in zip(batch["id"], batch["y"], strict=True)]
        rows = sum(len(other["id"]) for other in valid.iter_batches(batch_size=5, batch_format="pandas"))
        with tempfile.TemporaryDirectory() as made:
            Path(made, f"rank-{rank}.json").write_text(json.dumps(seen))
            ray.train.report({"valid": rows}, checkpoint=Checkpoint.from_directory(made))
        if before is None and rank == 1 and len(seen) == 8:
            raise RuntimeError("it fails once")


def main(folder: str) -> None:
    ray.data.range(32).map(lambda row: {"id": row["id"], "x": row["id"], "y": 2.0, "s": ""}).write_parquet(folder)
    rows = ray.data.read_parquet(folder, override_num_blocks=4).drop_columns(["s"]).filter(lambda row: row["id"] < 30)
    rows = rows.map_batches(Scale, fn_constructor_kwargs={"factor": 4.0}, concurrency=2)
    train, valid = rows.train_test_split(6)
    train = train.random_shuffle(seed=5)
    result = TorchTrainer(
        train_func,
        datasets={"train": train, "valid": valid},
        dataset_config=DataConfig(datasets_to_split=["train"]),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=f"{folder}/runs", failure_config=FailureConfig(max_failures=1)),
    ).fit()
    with result.checkpoint.as_directory() as last:
        seen = [row for file in Path(last).glob("rank-*.json") for row in json.loads(file.read_text())]
    print(json.dumps({"seen": sorted(seen), "valid": result.metrics["valid"]}))


if __name__ == "__main__":
    main(sys.argv[1])

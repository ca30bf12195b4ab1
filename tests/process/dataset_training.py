"""Train on a dataset of row ids, and keep in each checkpoint the ids that the run has trained on so far.

    python -m tests.process.dataset_training STORAGE SOURCE WORKERS KILL

KILL: 1 kills a rank at first, and the whole run after that restart; 0 kills nothing.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

import distrain
from distrain import data
from distrain.torch import TorchTrainer, prepare_data_loader

if TYPE_CHECKING:
    from collections.abc import Iterable

ROWS = 203
EPOCHS = 2


class Items(torch.utils.data.Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, place: int) -> dict[str, int]:
        return {"id": place}


def parquet(storage: Path) -> data.Dataset:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = storage / "rows"
    if not folder.exists():
        folder.mkdir(parents=True)
        for first in range(0, ROWS, 50):
            rows = range(first, min(ROWS, first + 50))
            pq.write_table(pa.table({"id": rows}), folder / f"{first}.parquet", row_group_size=20)
    return data.read_parquet(folder).random_shuffle(seed=5, buffer_rows=30)


SOURCES = {
    "parquet": parquet,
    "items": lambda _: Items(),
    "loader": lambda _: [],
}


def seen_before() -> list[list[int]]:
    """Return epoch and id of every row that the checkpoint's ranks have trained on."""
    checkpoint = distrain.get_checkpoint()
    if checkpoint is None:
        return []
    with checkpoint.as_directory() as folder:
        return [row for file in Path(folder).glob("rank-*.json") for row in json.loads(file.read_text())]


def train(config: dict[str, Any]) -> None:
    context = distrain.get_context()
    rank = context.get_world_rank()
    chance = random.Random(config["seed"] + context.attempt)
    kill_at, every, size = chance.randint(3, 15), chance.randint(1, 4), chance.randint(3, 8)
    seen = seen_before() if rank == 0 else []
    steps = 0
    first_epoch, batches = data_of(config["source"], size, chance.randint(0, 3))
    for epoch in range(first_epoch, EPOCHS):
        for batch in batches:
            seen += [[epoch, row] for row in batch["id"].tolist()]
            steps += 1
            if steps % every == 0:
                report(seen, rank)
            if config["kill"] and steps == kill_at and rank == context.attempt % 2:
                os.kill(config["user"] if context.attempt % 2 else os.getpid(), signal.SIGKILL)
    report(seen, rank)


def data_of(source: str, batch_size: int, ahead: int) -> tuple[int, Iterable[dict[str, Any]]]:
    """Return the epoch to begin with, and what gives the batches of one epoch after the other."""
    if source == "loader":
        plain = DataLoader(Items(), batch_size=batch_size, shuffle=True, num_workers=ahead % 2)
        loader = prepare_data_loader(plain)
        return loader.sampler.epoch, loader
    shard = distrain.get_dataset_shard("train")
    return shard.epoch, shard.iter_torch_batches(batch_size=batch_size, prefetch_batches=ahead)


def report(seen: list[list[int]], rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"rank-{rank}.json").write_text(json.dumps(seen))
        distrain.report({"rows": len(seen)}, distrain.Checkpoint.from_directory(folder))


def main(storage: Path, source: str, workers: int, kill: bool, seed: int) -> None:
    TorchTrainer(
        train,
        train_loop_config={"source": source, "kill": kill, "user": os.getpid(), "seed": seed},
        scaling_config=distrain.ScalingConfig(num_workers=workers),
        run_config=distrain.RunConfig(
            name="run", storage_path=storage, failure_config=distrain.FailureConfig(max_failures=1)
        ),
        datasets={"train": SOURCES[source](storage)},
    ).fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1", int(sys.argv[5]))

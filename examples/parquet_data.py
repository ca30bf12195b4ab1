"""Train on Parquet files, lose a worker in the middle of an epoch, and continue with another number of workers.

    pip install -e '.[data]'
    python examples/parquet_data.py

Every checkpoint stores how far training has come in the files. The script counts how often it trains on each row. At
the end, each row was used once per epoch.
"""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn

import distrain
from distrain import Checkpoint, RunConfig, ScalingConfig, TrainingFailedError
from distrain.torch import TorchTrainer, get_device, prepare_model

FILES, ROWS_PER_FILE = 4, 6_000
ROWS = FILES * ROWS_PER_FILE
EPOCHS = 2


def write_files(folder: str) -> None:
    """Write random points with 4 features, and a linear function of them, to Parquet files."""
    random = np.random.default_rng(0)
    for number in range(FILES):
        features = random.normal(size=(ROWS_PER_FILE, 4))
        columns = {
            "row": np.arange(ROWS_PER_FILE) + number * ROWS_PER_FILE,
            "features": list(features),
            "target": features @ [1.0, -2.0, 3.0, -4.0],
        }
        pq.write_table(pa.table(columns), Path(folder, f"{number}.parquet"), row_group_size=1_000)


def train_func(config: dict[str, Any]) -> None:
    rank = distrain.get_context().get_world_rank()
    module = nn.Linear(4, 1)
    model = prepare_model(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    times_used = torch.zeros(ROWS, device=get_device())

    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "training.pt"), map_location=get_device())
        module.load_state_dict(state["model"])
        if rank == 0:  # it counts on; the other workers begin with zeros
            times_used = state["times_used"]

    def save(loss: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            of_all = times_used.clone()
            dist.all_reduce(of_all)
            if rank == 0:
                torch.save({"model": module.state_dict(), "times_used": of_all}, Path(folder, "training.pt"))
            distrain.report({"loss": loss}, checkpoint=Checkpoint.from_directory(folder))

    rows = distrain.get_dataset_shard("train")
    for epoch in range(rows.epoch, EPOCHS):
        for step, batch in enumerate(rows.iter_torch_batches(batch_size=150, dtypes=torch.float32)):
            loss = nn.functional.mse_loss(model(batch["features"])[:, 0], batch["target"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times_used[batch["row"].long()] += 1
            if step % 20 == 19:
                save(loss.item())
            if epoch == config["killed_in"] and step == 50 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    save(loss.item())


def run(folder: str, *, num_workers: int, killed_in: int | None) -> distrain.Result:
    return TorchTrainer(
        train_func,
        train_loop_config={"killed_in": killed_in},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name="parquet"),  # a run with the name of an earlier one continues it
        datasets={"train": distrain.data.read_parquet(folder).random_shuffle(seed=1)},
    ).fit()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder)
        try:
            run(folder, num_workers=2, killed_in=1)
        except TrainingFailedError:
            print("2 workers: one was killed in the second epoch")
        result = run(folder, num_workers=3, killed_in=None)
    with result.checkpoint.as_directory() as run_files:
        state = torch.load(Path(run_files, "training.pt"), map_location="cpu")
    print(f"3 workers went on: loss {result.metrics['loss']:.4f}")
    assert (state["times_used"] == EPOCHS).all()
    print(f"each row was used {EPOCHS} times in {EPOCHS} epochs")


if __name__ == "__main__":
    main()

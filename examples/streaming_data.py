"""Train on a stream of text, lose a worker in the middle of an epoch, and continue as if nothing had happened.

    pip install -e '.[data]'
    python examples/streaming_data.py

The stream reads files line by line, and packs their bytes into rows of equal length, as for a language model. It is a
function, which each epoch calls. distrain stores in every checkpoint how many rows were read. One run trains without
interruption. In the other one a worker is killed, and distrain restarts the workers from the last checkpoint: they read
the stream again up to that row. Both runs end with exactly the same weights, after the same rows.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import distrain
from distrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from distrain.torch import TorchTrainer, get_device, prepare_model

FILES, BYTES_PER_FILE, BYTES_PER_ROW = 3, 32_000, 32
ROWS = FILES * BYTES_PER_FILE // BYTES_PER_ROW
EPOCHS = 2
KILLED_AT = 70
"""An epoch has 50 steps, and every 20th step saves a checkpoint."""


def write_files(folder: str) -> None:
    """Write the manual in Python's `help()` to text files."""
    text = "".join(topics.topics.values()).encode()
    for number in range(FILES):
        begin = number * BYTES_PER_FILE
        Path(folder, f"{number}.txt").write_bytes(text[begin : begin + BYTES_PER_FILE])


def packed_text(folder: str) -> Iterator[dict[str, Any]]:
    """Yield rows of bytes, from one file after the other. A row begins where the one before ends, also across files."""
    rest, row = b"", 0
    for path in sorted(Path(folder).glob("*.txt")):
        for line in path.read_bytes().splitlines(keepends=True):
            rest += line
            while len(rest) >= BYTES_PER_ROW:
                yield {"row": row, "text": np.frombuffer(rest[:BYTES_PER_ROW], np.uint8)}
                rest, row = rest[BYTES_PER_ROW:], row + 1


def train_func(config: dict[str, Any]) -> None:
    context = distrain.get_context()
    rank = context.get_world_rank()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))  # from each byte to the one after it
    model = prepare_model(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    times_used = torch.zeros(ROWS, device=get_device())
    step = 0

    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "training.pt"), map_location=get_device())
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        if rank == 0:  # it counts on; the other workers begin with zeros
            times_used = state["times_used"]

    def save(metrics: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            of_all = times_used.clone()
            dist.all_reduce(of_all)
            if rank == 0:
                weights = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**weights, "step": step, "times_used": of_all}, Path(folder, "training.pt"))
            distrain.report(metrics, checkpoint=Checkpoint.from_directory(folder))

    rows = distrain.get_dataset_shard("text")
    for epoch in range(rows.epoch, EPOCHS):
        for batch in rows.iter_torch_batches(batch_size=30):
            text = batch["text"].long()
            loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times_used[batch["row"]] += 1
            step += 1
            if step % 20 == 0:
                save({"epoch": epoch, "step": step, "loss": loss.item()})
            if step == KILLED_AT and config["is_killed"] and context.attempt == 0 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def run(folder: str, *, is_killed: bool) -> tuple[distrain.Result, dict[str, Any]]:
    result = TorchTrainer(
        train_func,
        train_loop_config={"is_killed": is_killed},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
        datasets={"text": partial(packed_text, folder)},
    ).fit()
    with result.checkpoint.as_directory() as files:
        return result, torch.load(Path(files, "training.pt"), map_location="cpu")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder)
        straight, expected = run(folder, is_killed=False)
        resumed, state = run(folder, is_killed=True)
    print(f"first loss {straight.metrics_dataframe['loss'][0]:.3f}")
    print(f"without interruption: loss {straight.metrics['loss']!r}")
    print(f"killed in the second epoch, and resumed: loss {resumed.metrics['loss']!r}")
    assert all(torch.equal(state["model"][name], weights) for name, weights in expected["model"].items())
    print("the weights are the same, to the last bit")
    assert (state["times_used"] == EPOCHS).all()
    print(f"each of {ROWS} rows was used {EPOCHS} times in {EPOCHS} epochs")


if __name__ == "__main__":
    main()

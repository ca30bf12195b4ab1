"""Train on a Hugging Face dataset or a stream of it, and lose a worker in the middle of an epoch.

    pip install datasets
    python examples/huggingface_data.py
    python examples/huggingface_data.py --streaming

distrain restarts the workers from the last checkpoint, which has the position in the data, too. The script counts how
often it trains on each image. At the end, each image was used once per epoch.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import distrain
from distrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from distrain.torch import TorchTrainer, get_device, prepare_model

DIGITS = Path(__file__).resolve().parent / "data" / "digits" / "MNIST" / "raw"
EPOCHS = 6


def load_digits() -> datasets.Dataset:
    """Return 8x8 images of handwritten digits."""
    images = np.frombuffer((DIGITS / "train-images-idx3-ubyte").read_bytes(), np.uint8, offset=16).reshape(-1, 64)
    labels = np.frombuffer((DIGITS / "train-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    images, labels = images[:1400], labels[:1400]  # a number that two workers divide evenly
    return datasets.Dataset.from_dict({"number": range(len(labels)), "image": images, "label": labels})


def scaled(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "image": np.asarray(row["image"], dtype=np.float32) / 255}


def train_func(config: dict[str, Any]) -> None:
    context = distrain.get_context()
    rank = context.get_world_rank()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = prepare_model(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    times_used = torch.zeros(config["images"], device=get_device())

    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "training.pt"), map_location=get_device())
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if rank == 0:  # it counts on; the other workers begin with zeros
            times_used = state["times_used"]

    def save(metrics: dict[str, float]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            of_all = times_used.clone()
            dist.all_reduce(of_all)
            if rank == 0:
                state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "times_used": of_all}
                torch.save(state, Path(folder, "training.pt"))
            distrain.report(metrics, checkpoint=Checkpoint.from_directory(folder))

    images = distrain.get_dataset_shard("train")
    for epoch in range(images.epoch, EPOCHS):
        for step, batch in enumerate(images.iter_torch_batches(batch_size=20)):
            outputs = model(batch["image"])
            loss = nn.functional.cross_entropy(outputs, batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times_used[batch["number"]] += 1
            if step % 10 == 9:
                accuracy = (outputs.argmax(1) == batch["label"]).float().mean().item()
                save({"epoch": epoch, "loss": loss.item(), "accuracy": accuracy})
            if epoch == 2 and step == 15 and rank == 1 and context.attempt == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    save({"epoch": epoch, "loss": loss.item(), "accuracy": accuracy})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streaming", action="store_true", help="read the rows as a stream")
    streaming = parser.parse_args().streaming

    digits = load_digits()
    rows = distrain.data.from_huggingface(digits.to_iterable_dataset(num_shards=4) if streaming else digits)
    result = TorchTrainer(
        train_func,
        train_loop_config={"images": len(digits)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
        datasets={"train": rows.map(scaled).random_shuffle(seed=1, buffer_rows=700)},
    ).fit()
    with result.checkpoint.as_directory() as folder:
        times_used = torch.load(Path(folder, "training.pt"), map_location="cpu")["times_used"]
    print(f"a worker was killed in epoch 2, and the run went on: loss {result.metrics['loss']:.3f}")
    assert (times_used == EPOCHS).all()
    print(f"each image was used {EPOCHS} times in {EPOCHS} epochs")


if __name__ == "__main__":
    main()

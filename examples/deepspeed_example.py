"""Train with ZeRO of DeepSpeed, and resume exactly.

    pip install deepspeed
    python examples/deepspeed_example.py
    python examples/deepspeed_example.py --stage 2

ZeRO shards the optimizer's state over the workers, and with stage 2 the gradients, too. Each worker saves its shard in
DeepSpeed's format, and reports the directory. distrain joins these directories to one checkpoint. The second run starts
from the checkpoint in the middle of the first one, and ends with exactly the same loss.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"  # before deepspeed is imported; the workers inherit it

import deepspeed
from torch import nn

import distrain
from distrain import Checkpoint, ScalingConfig
from distrain.torch import TorchTrainer, get_device

STEPS, SAVE_EVERY = 30, 15
WIDTH = 64


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of this worker for a step."""
    context = distrain.get_context()
    seed = step * context.get_world_size() + context.get_world_rank()
    features = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed)).to(get_device())
    return features, features.flip(1)


def train_func(config: dict[str, Any]) -> None:
    if get_device().type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # a faster all_reduce would be compiled from C++ first
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),  # those of DeepSpeed compile C++ or CUDA
        config={
            "train_micro_batch_size_per_gpu": 32,
            "zero_optimization": {"stage": config["stage"]},
        },
        dist_init_required=False,  # distrain has made the process group
    )
    first = 0
    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            _, state = engine.load_checkpoint(folder)
        first = state["step"] + 1

    for step in range(first, STEPS):
        features, targets = make_batch(step)
        loss = nn.functional.mse_loss(engine(features), targets)
        engine.backward(loss)
        engine.step()
        metrics = {"step": step, "loss": loss.item()}
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            with tempfile.TemporaryDirectory() as folder:  # one for each worker
                engine.save_checkpoint(folder, client_state={"step": step})
                distrain.report(metrics, checkpoint=Checkpoint.from_directory(folder))
        else:
            distrain.report(metrics)


def run(stage: int, resume_from: Checkpoint | None = None) -> distrain.Result:
    return TorchTrainer(
        train_func,
        train_loop_config={"stage": stage},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.device_count() > 1),
        resume_from_checkpoint=resume_from,
    ).fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=1, choices=(1, 2), help="stage of ZeRO (default: 1)")
    stage = parser.parse_args().stage
    straight = run(stage)
    checkpoint, metrics = straight.best_checkpoints[0]
    print(f"after {metrics['step'] + 1} steps: loss {metrics['loss']:.4f}")
    with checkpoint.as_directory() as folder:
        files = [path.name for path in Path(folder).rglob("*.pt")]
    print(f"its files: {', '.join(sorted(files))}")
    resumed = run(stage, resume_from=checkpoint)
    print(f"after {STEPS} steps: loss {straight.metrics['loss']!r}")
    print(f"resumed in the middle: loss {resumed.metrics['loss']!r}")
    assert resumed.metrics["loss"] == straight.metrics["loss"]
    print("the same, to the last bit")


if __name__ == "__main__":
    main()

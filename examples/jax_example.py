"""Train a JAX model on two processes, each with a part of every batch.

    pip install 'distrain[jax]'
    python examples/jax_example.py

JaxTrainer connects the processes, so that `jax.devices()` has the devices of all of them, and arrays can be spread over
them. A worker is killed in between, and the run continues from the last checkpoint.
"""

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import distrain
from distrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from distrain.jax import JaxTrainer

DIGITS = Path(__file__).resolve().parent / "data" / "digits" / "MNIST" / "raw"
GLOBAL_BATCH_SIZE = 64
KILLED_IN_EPOCH = 2

Weights = dict[str, Any]


def load_digits(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the 8x8 images of handwritten digits in examples/data. `part`: train or t10k, MNIST's names."""
    images = np.frombuffer((DIGITS / f"{part}-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    labels = np.frombuffer((DIGITS / f"{part}-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    return images.reshape(-1, 64).astype("float32") / 255, labels.astype("int32")


def make_weights() -> Weights:
    random = np.random.default_rng(0)
    shapes = {"hidden": (64, 64), "output": (64, 10)}
    return {name: random.normal(0, 0.1, shape).astype("float32") for name, shape in shapes.items()}


def logits(weights: Weights, images: Any) -> Any:
    return jax.nn.relu(images @ weights["hidden"]) @ weights["output"]


def loss_of(weights: Weights, images: Any, labels: Any) -> Any:
    return -jax.nn.log_softmax(logits(weights, images))[jnp.arange(len(labels)), labels].mean()


@jax.jit
def step(weights: Weights, images: Any, labels: Any) -> tuple[Weights, Any]:
    """Return new weights and the loss. JAX averages over the images of all processes."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, images, labels)
    return jax.tree.map(lambda weight, gradient: weight - 0.5 * gradient, weights, gradients), loss


def train_func(config: dict[str, Any]) -> None:
    context = distrain.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    mesh = Mesh(jax.devices(), ("data",))
    everywhere, spread = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    checkpoint = distrain.get_checkpoint()
    state = {"epoch": 0, "weights": make_weights()} if checkpoint is None else checkpoint.to_dict()
    weights = jax.device_put(state["weights"], everywhere)
    images, labels = load_digits("train")
    print(f"begins in epoch {state['epoch']}, with {jax.local_device_count()} of {jax.device_count()} devices")

    for epoch in range(state["epoch"], config["epochs"]):
        order = np.random.default_rng(epoch).permutation(len(images))
        for first in range(0, len(order) - GLOBAL_BATCH_SIZE + 1, GLOBAL_BATCH_SIZE):
            own = order[first : first + GLOBAL_BATCH_SIZE][rank::size]
            batch = [jax.make_array_from_process_local_data(spread, part[own]) for part in (images, labels)]
            weights, loss = step(weights, *batch)
        if epoch == KILLED_IN_EPOCH and checkpoint is None and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        new = {"epoch": epoch + 1, "weights": jax.device_get(weights)}
        metrics = {"epoch": epoch, "loss": float(loss)}
        distrain.report(metrics, checkpoint=Checkpoint.from_dict(new) if rank == 0 else None)


def main() -> None:
    result = JaxTrainer(
        train_func,
        train_loop_config={"epochs": 5},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    ).fit()
    print(f"a worker was killed in epoch {KILLED_IN_EPOCH}, and the run went on: loss {result.metrics['loss']:.3f}")
    images, labels = load_digits("t10k")
    found = logits(result.checkpoint.to_dict()["weights"], images).argmax(axis=1)
    print(f"accuracy on the test images: {(found == labels).mean():.3f}")


if __name__ == "__main__":
    main()

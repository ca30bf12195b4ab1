"""Save checkpoints of a Keras model, continue after a failure, and start another run from a checkpoint.

    pip install 'distrain[tensorflow]'
    python examples/tensorflow_checkpoints.py

Saving the model is a collective operation, so every rank saves and reports it. distrain stores the files of the lowest
rank.
"""

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import distrain
from distrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from distrain.tensorflow import TensorflowTrainer


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Return random points and a linear function of them."""
    features = np.random.default_rng(0).normal(size=(100, 4)).astype("float32")
    return features, features @ np.array([[1.0], [-2.0], [3.0], [-4.0]], "float32")


def train_func(config: dict[str, Any]) -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    first = 0
    with strategy.scope():
        checkpoint = distrain.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                model = tf.keras.models.load_model(Path(folder) / "model.keras")  # includes the state of the optimizer
                first = json.loads((Path(folder) / "state.json").read_text())["epoch"] + 1
        else:
            model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
            model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.5), "mse")
    features, targets = make_data()
    for epoch in range(first, config["epochs"]):
        is_first_attempt = distrain.get_context().attempt == 0
        if epoch == config["killed_in"] and is_first_attempt and distrain.get_context().get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        history = model.fit(features, targets, batch_size=20, verbose=0)
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "model.keras")
            (Path(folder) / "state.json").write_text(json.dumps({"epoch": epoch}))
            metrics = {"epoch": epoch, "loss": history.history["loss"][0]}
            distrain.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def run(epochs: int, killed_in: int | None, resume_from: Checkpoint | None = None) -> distrain.Result:
    return TensorflowTrainer(
        train_func,
        train_loop_config={"epochs": epochs, "killed_in": killed_in},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
        resume_from_checkpoint=resume_from,
    ).fit()


def main() -> None:
    first = run(epochs=4, killed_in=2)
    print(f"killed in epoch 2, and resumed; after epoch {first.metrics['epoch']}: loss {first.metrics['loss']:.4f}")
    print(f"epochs of the first run: {[metrics['epoch'] for _, metrics in first.best_checkpoints]}")
    second = run(epochs=6, killed_in=None, resume_from=first.checkpoint)
    print(f"epochs of the second run: {[metrics['epoch'] for _, metrics in second.best_checkpoints]}")
    print(f"after epoch {second.metrics['epoch']}: loss {second.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()

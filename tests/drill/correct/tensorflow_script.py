"""Train a Keras model with TensorFlow, and save it after each epoch, with its optimizer.

    python tests/drill/correct/tensorflow_script.py

Needs TensorFlow. The data are not shuffled, and nothing draws random numbers.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

import distrain
from distrain import Checkpoint
from distrain.tensorflow import TensorflowTrainer

EPOCHS, EPOCHS_PER_CHECKPOINT = 20, 4


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Return random points and a linear function of them."""
    features = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    return features, features @ np.array([[1.0], [-2.0], [3.0], [-4.0]], "float32")


def train_func(config: dict[str, Any]) -> None:
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
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
            model.compile(tf.keras.optimizers.SGD(config["lr"], momentum=0.5), "mse")
    features, targets = make_data()
    for epoch in range(first, EPOCHS):
        history = model.fit(features, targets, batch_size=32, shuffle=False, verbose=0)
        metrics = {"epoch": epoch, "loss": history.history["loss"][0]}
        if (epoch + 1) % EPOCHS_PER_CHECKPOINT:
            distrain.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:  # saving is a collective operation, so every rank does it
            model.save(Path(folder) / "model.keras")
            (Path(folder) / "state.json").write_text(json.dumps({"epoch": epoch}))
            distrain.report(metrics, checkpoint=Checkpoint.from_directory(folder))


if __name__ == "__main__":
    result = TensorflowTrainer(
        train_func,
        train_loop_config={"lr": 0.05},
        scaling_config=distrain.ScalingConfig(num_workers=2),
        run_config=distrain.RunConfig(storage_path="results", failure_config=distrain.FailureConfig(max_failures=3)),
    ).fit()
    print(result.metrics)

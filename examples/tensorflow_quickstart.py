"""Train a small network with Keras' model.fit() on two workers: the quick start of distrain with TensorFlow.

    pip install 'distrain[tensorflow]'
    python examples/tensorflow_quickstart.py
    python examples/tensorflow_quickstart.py --use-gpu --num-workers 4

The strategy divides each batch among the workers and averages the gradients. So the batch size is that of all workers
together. The callback reports the metrics of every epoch, and a checkpoint with the model.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import distrain
from distrain.tensorflow import TensorflowCheckpoint, TensorflowTrainer

DIGITS = Path(__file__).resolve().parent / "data" / "digits" / "MNIST" / "raw"
BATCH_SIZE_OF_A_WORKER = 32


def load_digits(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the 8x8 images of handwritten digits in examples/data. `part`: train or t10k, MNIST's names."""
    images = np.frombuffer((DIGITS / f"{part}-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    labels = np.frombuffer((DIGITS / f"{part}-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    return images.reshape(-1, 8, 8, 1).astype("float32") / 255, labels.astype("int64")


def build_model() -> Any:
    import tensorflow as tf

    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def train_func(config: dict[str, Any]) -> None:
    import tensorflow as tf

    from distrain.tensorflow.keras import ReportCheckpointCallback

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build_model()
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(config["lr"]), loss, metrics=["accuracy"])
    model.fit(
        *load_digits("train"),
        batch_size=BATCH_SIZE_OF_A_WORKER * distrain.get_context().get_world_size(),
        epochs=config["epochs"],
        verbose=0,
        callbacks=[ReportCheckpointCallback()],
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    trainer = TensorflowTrainer(
        train_func,
        train_loop_config={"lr": 3e-3, "epochs": options.epochs},
        scaling_config=distrain.ScalingConfig(num_workers=options.num_workers, use_gpu=options.use_gpu),
    )
    result = trainer.fit()
    print(f"reported accuracy of the training: {result.metrics['accuracy']:.3f}")

    model = TensorflowCheckpoint.from_checkpoint(result.checkpoint).get_model()
    images, labels = load_digits("t10k")
    accuracy = (model.predict(images, verbose=0).argmax(axis=1) == labels).mean()
    print(f"accuracy of the model in the checkpoint on the test images: {accuracy:.3f}")


if __name__ == "__main__":
    main()

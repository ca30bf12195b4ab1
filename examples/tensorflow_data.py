"""Train with TensorFlow on a dataset, and lose a worker in the middle of an epoch.

    pip install 'distrain[tensorflow]'
    python examples/tensorflow_data.py

distrain restarts the workers from the last checkpoint, which has the position in the data, too. The script counts how
often it trains on each image. At the end, each image was used once per epoch.
"""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import distrain
from distrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from distrain.tensorflow import TensorflowTrainer

DIGITS = Path(__file__).resolve().parent / "data" / "digits" / "MNIST" / "raw"
EPOCHS = 4
BATCH_SIZE = 25
"""Images of each worker in a step."""


def load_digits() -> dict[str, np.ndarray]:
    """Return 8x8 images of handwritten digits."""
    images = np.frombuffer((DIGITS / "train-images-idx3-ubyte").read_bytes(), np.uint8, offset=16).reshape(-1, 64)
    labels = np.frombuffer((DIGITS / "train-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    images, labels = images[:1400], labels[:1400]  # a number that two workers divide evenly
    return {"number": np.arange(1400), "image": images.astype("float32") / 255, "label": labels.astype("int64")}


def train_func(config: dict[str, Any]) -> None:
    import tensorflow as tf

    context = distrain.get_context()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential(
            [tf.keras.layers.Dense(64, activation="relu", input_shape=(64,)), tf.keras.layers.Dense(10)]
        )
        optimizer = tf.keras.optimizers.Adam(3e-3)
        optimizer.build(model.trainable_variables)
        times_used = tf.Variable(tf.zeros(config["images"], tf.int32), aggregation=tf.VariableAggregation.SUM)
        saved = tf.train.Checkpoint(model=model, optimizer=optimizer, times_used=times_used)
    checkpoint = distrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved.read(f"{folder}/training").assert_consumed()

    def step(batch: dict[str, Any]) -> Any:
        """Return this worker's part of the loss. TensorFlow sums the gradients over the workers."""
        with tf.GradientTape() as tape:
            losses = tf.keras.losses.sparse_categorical_crossentropy(
                batch["label"], model(batch["image"]), from_logits=True
            )
            loss = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        times_used.assign_add(tf.math.bincount(tf.cast(batch["number"], tf.int32), minlength=config["images"]))
        return loss

    @tf.function
    def train_step(batch: dict[str, Any]) -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=(batch,)), axis=None)

    images = distrain.get_dataset_shard("train")
    for epoch in range(images.epoch, EPOCHS):
        for number, batch in enumerate(images.iter_tf_batches(batch_size=BATCH_SIZE)):
            loss = float(train_step(batch))
            if number % 10 == 9:
                with tempfile.TemporaryDirectory() as folder:
                    saved.write(f"{folder}/training")  # on every rank; distrain stores the files of rank 0
                    distrain.report({"epoch": epoch, "loss": loss}, checkpoint=Checkpoint.from_directory(folder))
            if epoch == 2 and number == 15 and context.get_world_rank() == 1 and context.attempt == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    distrain.report({"loss": loss, "least": int(min(times_used.numpy())), "most": int(max(times_used.numpy()))})


def main() -> None:
    digits = load_digits()
    result = TensorflowTrainer(
        train_func,
        train_loop_config={"images": len(digits["number"])},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
        datasets={"train": distrain.data.from_numpy(digits).random_shuffle(seed=1)},
    ).fit()
    metrics = result.metrics
    print(f"a worker was killed in epoch 2, and the run went on: loss {metrics['loss']:.3f}")
    assert metrics["least"] == metrics["most"] == EPOCHS
    print(f"each image was used {EPOCHS} times in {EPOCHS} epochs")


if __name__ == "__main__":
    main()

"""Train with Keras 3 on two workers, in a custom training loop.

    pip install 'distrain[tensorflow]'
    python examples/keras_3_example.py

The model.fit() of Keras 3 does not work under MultiWorkerMirroredStrategy. Therefore tf.keras is Keras 2 in workers.
`import keras` is always Keras 3, and works with a loop like this one.
"""

from pathlib import Path
from typing import Any

import numpy as np

import distrain
from distrain.tensorflow import TensorflowCheckpoint, TensorflowTrainer

DIGITS = Path(__file__).resolve().parent / "data" / "digits" / "MNIST" / "raw"
GLOBAL_BATCH_SIZE = 64


def load_digits(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the 8x8 images of handwritten digits in examples/data. `part`: train or t10k, MNIST's names."""
    images = np.frombuffer((DIGITS / f"{part}-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    labels = np.frombuffer((DIGITS / f"{part}-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    return images.reshape(-1, 64).astype("float32") / 255, labels.astype("int64")


def share_out(strategy: Any, data: tuple[np.ndarray, np.ndarray]) -> Any:
    """Return the batches of this worker: its part of every global batch."""
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[0]), seed=0).batch(GLOBAL_BATCH_SIZE)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return strategy.experimental_distribute_dataset(batches.with_options(options))


def train_func(config: dict[str, Any]) -> None:
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        optimizer = keras.optimizers.Adam(config["lr"])
        optimizer.build(model.trainable_variables)

    def step(images: Any, labels: Any) -> Any:
        """Return this worker's part of the loss. TensorFlow sums the gradients over the workers."""
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(labels, model(images), from_logits=True)
            loss = tf.reduce_sum(losses) / GLOBAL_BATCH_SIZE
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def train_step(batch: Any) -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=batch), axis=None)

    for epoch in range(config["epochs"]):
        losses = [float(train_step(batch)) for batch in share_out(strategy, load_digits("train"))]
        checkpoint = TensorflowCheckpoint.from_model(model)  # on every rank
        is_first = distrain.get_context().get_world_rank() == 0
        metrics = {"epoch": epoch, "loss": sum(losses) / len(losses)}
        distrain.report(metrics, checkpoint=checkpoint if is_first else None)


def main() -> None:
    trainer = TensorflowTrainer(
        train_func,
        train_loop_config={"lr": 3e-3, "epochs": 5},
        scaling_config=distrain.ScalingConfig(num_workers=2),
    )
    result = trainer.fit()
    print(f"reported loss: {result.metrics['loss']:.3f}")

    model = TensorflowCheckpoint.from_checkpoint(result.checkpoint).get_model()
    images, labels = load_digits("t10k")
    accuracy = (model.predict(images, verbose=0).argmax(axis=1) == labels).mean()
    print(f"accuracy on the test images: {accuracy:.3f}")


if __name__ == "__main__":
    main()

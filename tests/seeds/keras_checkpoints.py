"""Keras models in checkpoints, and a second run that starts from that of the first."""

import json
import os
import tempfile

import numpy
from ray import train
from ray.train import Checkpoint, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train_func(config):
    import tensorflow as tf

    with tf.distribute.experimental.MultiWorkerMirroredStrategy().scope():
        checkpoint = train.get_checkpoint()
        if checkpoint:
            print("continues from", checkpoint.path)
            with checkpoint.as_directory() as folder:
                model = tf.keras.models.load_model(os.path.join(folder, "model.keras"))
        else:
            model = tf.keras.Sequential([tf.keras.layers.Dense(1, activation="linear", input_shape=(4,))])
        model.compile(optimizer="Adam", loss="mean_squared_error", metrics=["mse"])

    inputs = numpy.random.normal(0, 1, size=(100, 4))
    outputs = numpy.random.uniform(0, 1, size=(100, 1))
    for epoch in range(config["num_epochs"]):
        history = model.fit(inputs, outputs, batch_size=20)
        with tempfile.TemporaryDirectory() as folder:
            model.save(os.path.join(folder, "model.keras"))
            with open(os.path.join(folder, "checkpoint.json"), "w") as file:
                json.dump({"epoch": epoch}, file)
            train.report({"loss": history.history["loss"][0]}, checkpoint=Checkpoint.from_directory(folder))


checkpoint = None
for _ in range(2):
    trainer = TensorflowTrainer(
        train_func,
        train_loop_config={"num_epochs": 3},
        scaling_config=ScalingConfig(num_workers=2),
        resume_from_checkpoint=checkpoint,
    )
    result = trainer.fit()
    checkpoint = result.checkpoint
    print(checkpoint)

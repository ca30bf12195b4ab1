"""A Keras model whose metrics and checkpoints a callback reports, and one that trains on a shard of its own."""

import numpy
import tensorflow as tf
from ray import train
from ray.train import ScalingConfig
from ray.train.tensorflow import TensorflowConfig, TensorflowTrainer, prepare_dataset_shard
from ray.train.tensorflow.keras import ReportCheckpointCallback

worker_batch_size = 10


def make_model():
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
        model.compile("sgd", "mse")
    return model


def with_callback(config: dict):
    batch_size = worker_batch_size * train.get_context().get_world_size()
    inputs, outputs = numpy.ones((40, 4), "float32"), numpy.zeros((40, 1), "float32")
    model = make_model()
    for _ in range(config["epochs"]):
        model.fit(inputs, outputs, batch_size=batch_size, callbacks=[ReportCheckpointCallback()])


def with_shard(config: dict):
    def batches():
        rank = train.get_context().get_world_rank()
        for _ in range(2):
            yield tf.ones((4, 4)) * rank, tf.ones((4, 1))

    model = make_model()
    signature = (tf.TensorSpec(shape=(None, 4), dtype=tf.float32), tf.TensorSpec(shape=(None, 1), dtype=tf.float32))
    for _ in range(config["epochs"]):
        shard = prepare_dataset_shard(tf.data.Dataset.from_generator(batches, output_signature=signature))
        train.report({"loss": model.fit(shard).history["loss"]})


for train_func in (with_callback, with_shard):
    trainer = TensorflowTrainer(
        train_func,
        train_loop_config={"epochs": 2},
        tensorflow_backend=TensorflowConfig(),
        scaling_config=ScalingConfig(use_gpu=False, num_workers=2),
    )
    trainer.fit()

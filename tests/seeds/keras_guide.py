"""A Keras model whose metrics and checkpoints a callback reports, and two that train on a shard of a dataset."""

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
    dataset_shard = train.get_context().get_dataset_shard("train")
    model = make_model()

    def to_tf_dataset(dataset, batch_size):
        def to_tensor_iterator():
            for batch in dataset.iter_tf_batches(batch_size=batch_size, dtypes=tf.float32):
                yield batch["image"], batch["label"]

        output_signature = (
            tf.TensorSpec(shape=(None, 4), dtype=tf.float32),
            tf.TensorSpec(shape=(None, 1), dtype=tf.float32),
        )
        tf_dataset = tf.data.Dataset.from_generator(to_tensor_iterator, output_signature=output_signature)
        return prepare_dataset_shard(tf_dataset)

    for _ in range(config["epochs"]):
        tf_dataset = to_tf_dataset(dataset=dataset_shard, batch_size=4)
        train.report({"loss": model.fit(tf_dataset).history["loss"], "rows": dataset_shard.count()})


def with_to_tf(config: dict):
    shard = train.get_dataset_shard("train")
    history = make_model().fit(shard.to_tf("image", "label", batch_size=4), epochs=config["epochs"]).history
    train.report({"loss": history["loss"]})


for train_func in (with_callback, with_shard, with_to_tf):
    trainer = TensorflowTrainer(
        train_func,
        train_loop_config={"epochs": 2},
        tensorflow_backend=TensorflowConfig(),
        scaling_config=ScalingConfig(use_gpu=False, num_workers=2),
        datasets={"train": {"image": numpy.eye(16, 4), "label": numpy.ones((16, 1))}},
    )
    trainer.fit()

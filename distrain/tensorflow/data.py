"""Data sets that are shared out already. Runs in: anywhere with TensorFlow."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["prepare_dataset_shard"]


def prepare_dataset_shard(tf_dataset_shard: tf.data.Dataset) -> tf.data.Dataset:
    """The data set with automatic sharding off, and with prefetching.

    For one that holds this worker's share only: a strategy would share it out once more.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options).prefetch(tf.data.AUTOTUNE)

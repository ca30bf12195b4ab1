"""Data sets that hold one worker's share. Runs in: anywhere with TensorFlow."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["prepare_dataset_shard"]


def prepare_dataset_shard(tf_dataset_shard: tf.data.Dataset) -> tf.data.Dataset:
    """Return the data set with prefetching and without automatic sharding.

    Use it for a data set that holds only this worker's share. A strategy would divide it again. ::

        rank, size = distrain.get_context().get_world_rank(), distrain.get_context().get_world_size()
        dataset = prepare_dataset_shard(tf.data.Dataset.range(100).shard(size, rank).batch(10))
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options).prefetch(tf.data.AUTOTUNE)

"""TensorFlow on distrain. TensorFlow itself is imported when a name that needs it is first used. Runs in: anywhere.

The Keras callback is in :mod:`distrain.tensorflow.keras`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distrain.api.ray_names import explain
from distrain.system.imports import lazy_names

if TYPE_CHECKING:
    from distrain.tensorflow.checkpoint import TensorflowCheckpoint as TensorflowCheckpoint
    from distrain.tensorflow.config import TensorflowConfig as TensorflowConfig
    from distrain.tensorflow.data import prepare_dataset_shard as prepare_dataset_shard
    from distrain.tensorflow.trainer import TensorflowTrainer as TensorflowTrainer

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__, explain=explain)

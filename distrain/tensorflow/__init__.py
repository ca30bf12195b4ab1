"""TensorFlow on distrain. TensorFlow itself is imported when a name that needs it is first used. Runs in: anywhere.

The Keras callback is in :mod:`distrain.tensorflow.keras`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrain.absent import explain

if TYPE_CHECKING:
    from distrain.tensorflow.checkpoint import TensorflowCheckpoint
    from distrain.tensorflow.config import TensorflowConfig
    from distrain.tensorflow.data import prepare_dataset_shard
    from distrain.tensorflow.trainer import TensorflowTrainer

_HOME_OF = {
    "TensorflowCheckpoint": "checkpoint",
    "TensorflowConfig": "config",
    "TensorflowTrainer": "trainer",
    "prepare_dataset_shard": "data",
}

__all__ = ["TensorflowCheckpoint", "TensorflowConfig", "TensorflowTrainer", "prepare_dataset_shard"]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(explain(__name__, name))
    from importlib import import_module

    value = getattr(import_module(f"distrain.tensorflow.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

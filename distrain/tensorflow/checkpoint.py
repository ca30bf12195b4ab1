"""Keras models in checkpoints. Runs in: anywhere with TensorFlow."""

from __future__ import annotations

import json
import os
import zipfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrain.errors import CheckpointError
from distrain.storage.checkpoint import Checkpoint
from distrain.storage.names import DICT_FILE
from distrain.system.scratch import directory_of

if TYPE_CHECKING:
    from typing_extensions import Self


class TensorflowCheckpoint(Checkpoint):
    """A checkpoint that holds one Keras model, as ``model.keras``.

    To read one that was reported: ``TensorflowCheckpoint(result.checkpoint.path).get_model()``.

    ::

        checkpoint = TensorflowCheckpoint.from_model(model)
        distrain.report({"loss": 0.5}, checkpoint=checkpoint)
    """

    MODEL_FILENAME = "model.keras"

    @classmethod
    def from_model(cls, keras_model: Any, *, preprocessor: None = None) -> Self:
        """Make a checkpoint of the whole model with its optimizer.

        Under a distributed strategy every rank must call it, as saving is a collective. The file is in a temporary
        directory that is deleted with this object: report it, or copy it with ``to_directory``. ``preprocessor`` is a
        parameter of Ray AIR.

        Raises TypeError for an object without a ``save()``.
        """
        if not hasattr(keras_model, "save"):
            raise TypeError(f"TensorflowCheckpoint.from_model takes a Keras model, got {type(keras_model).__name__}")
        checkpoint = directory_of(cls, "distrain-checkpoint-")
        keras_model.save(os.path.join(checkpoint.path, cls.MODEL_FILENAME))
        return checkpoint

    @classmethod
    def from_h5(cls, file_path: str | os.PathLike[str], *, preprocessor: None = None) -> Self:
        """Make a checkpoint of a model that ``model.save("name.h5")`` of ``tf.keras`` has written."""
        return cls.from_model(import_module("tensorflow").keras.models.load_model(os.fspath(file_path)))

    def get_model(self) -> Any:
        """Load the model with the Keras that has saved it (2 or 3), which may differ from ``tf.keras``.

        Within a strategy's scope the model belongs to the strategy. Loading a model can run code that is in it: read
        only checkpoints that you trust. A checkpoint made by :meth:`from_dict` has its model under the key ``"model"``.

        Raises CheckpointError if there is no model in the checkpoint, or a damaged one, ModuleNotFoundError if its
        Keras is not installed.
        """
        with self.as_directory() as folder:
            if (Path(folder) / DICT_FILE).is_file() and "model" in (data := self.to_dict()):
                return data["model"]  # as in Ray AIR
            model = Path(folder) / self.MODEL_FILENAME
            if not model.is_file():
                raise CheckpointError(
                    f"{self.path or self} has no {model.name}, so no TensorflowCheckpoint was saved there"
                )
            return _load(model, os.path.join(self.path or str(self), model.name))


def _load(model: Path, shown: str) -> Any:
    """Load the model with the package that has saved it. The other one cannot read all of its files.

    shown: the model's path for error messages.
    """
    try:
        name = "keras" if _major_version(model) == 3 else "tf_keras"
        if find_spec(name) is None:
            missing = f"{name}, which is not installed: pip install 'distrain[tensorflow]'"
            raise ModuleNotFoundError(f"{model.name} was saved by {missing}", name=name)
        return import_module(name).models.load_model(str(model))
    except (zipfile.BadZipFile, OSError) as error:
        why = str(error).rstrip(".")
        raise CheckpointError(
            f"{shown} cannot be read: {why}. If it is damaged, take another checkpoint, or save the model once more"
        ) from error


def _major_version(model: Path) -> int:
    """Return the major version of the model's Keras. Raises BadZipFile or OSError without a whole model."""
    with zipfile.ZipFile(model) as archive:
        try:
            return int(json.loads(archive.read("metadata.json"))["keras_version"].partition(".")[0])
        except (KeyError, ValueError) as error:
            raise zipfile.BadZipFile(str(error)) from error

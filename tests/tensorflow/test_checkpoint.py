"""Keras models in checkpoints, and the callback that reports them. Needs TensorFlow: scripts/test_tensorflow."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy
import pytest

import distrain
from distrain import Checkpoint, CheckpointError
from distrain.tensorflow import TensorflowCheckpoint, TensorflowConfig
from tests.process.conftest import Fit, reported

if TYPE_CHECKING:
    from collections.abc import Callable

if find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; scripts/test_tensorflow", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),
]  # of TensorFlow and Keras, about each other
generations = pytest.mark.parametrize("package", ["tf_keras", "keras"])


def make_model(package: str) -> Any:
    keras = import_module(package)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.MeanSquaredError())
    return model


def check_that_it_is_the_same(loaded: Any, model: Any) -> None:
    assert type(loaded) is type(model)
    assert [array.tolist() for array in loaded.get_weights()] == [array.tolist() for array in model.get_weights()]
    inputs = numpy.ones((1, 3), "float32")
    assert numpy.array_equal(loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0))


# -- TensorflowCheckpoint --------------------------------------------------------------------------------------------


@generations
def test_a_model_is_loaded_by_the_keras_that_has_saved_it(package: str, tmp_path: Path) -> None:
    model = make_model(package)
    folder = TensorflowCheckpoint.from_model(model).to_directory(tmp_path)
    assert os.listdir(folder) == ["model.keras"]
    check_that_it_is_the_same(TensorflowCheckpoint(folder).get_model(), model)
    plain = Checkpoint.from_directory(folder)
    check_that_it_is_the_same(TensorflowCheckpoint.from_checkpoint(plain).get_model(), model)


def test_an_h5_file(tmp_path: Path) -> None:
    import tensorflow as tf

    model = make_model("tf_keras" if tf.keras.__version__.startswith("2") else "keras")
    model.save(tmp_path / "mine.h5")
    checkpoint = TensorflowCheckpoint.from_h5(tmp_path / "mine.h5")
    (tmp_path / "mine.h5").unlink()
    check_that_it_is_the_same(checkpoint.get_model(), model)


def test_a_dict_with_a_model() -> None:
    checkpoint = TensorflowCheckpoint.from_checkpoint(Checkpoint.from_dict({"model": "any object"}))
    assert checkpoint.get_model() == "any object"


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="takes a Keras model, got dict"):
        TensorflowCheckpoint.from_model({})
    with pytest.raises(CheckpointError, match=r"has no model\.keras"):
        TensorflowCheckpoint(tmp_path).get_model()


def halved(data: bytes) -> bytes:
    return data[: len(data) // 2]


def with_one_other_byte(data: bytes) -> bytes:
    """In the middle, where the weights are."""
    return b"".join((halved(data), bytes([data[len(data) // 2] ^ 0xFF]), data[len(data) // 2 + 1 :]))


@pytest.mark.parametrize("damage", [halved, with_one_other_byte])
@generations
def test_a_damaged_model_is_named(package: str, damage: Callable[[bytes], bytes]) -> None:
    checkpoint = TensorflowCheckpoint.from_model(make_model(package))
    file = Path(checkpoint.path, "model.keras")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError) as raised:
        checkpoint.get_model()
    assert str(raised.value).startswith(f"{file} cannot be read: ")
    assert str(raised.value).endswith("If it is damaged, take another checkpoint, or save the model once more")


def test_the_keras_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = TensorflowCheckpoint.from_model(make_model("tf_keras"))
    monkeypatch.setattr("distrain.tensorflow.checkpoint.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"saved by tf_keras, which is not installed: pip install"):
        checkpoint.get_model()


# -- prepare_dataset_shard -------------------------------------------------------------------------------------------


def test_a_prepared_data_set_is_not_shared_out_again() -> None:
    import tensorflow as tf

    from distrain.tensorflow import prepare_dataset_shard

    prepared = prepare_dataset_shard(tf.data.Dataset.range(5))
    assert [int(number) for number in prepared] == [0, 1, 2, 3, 4]
    policy = prepared.options().experimental_distribute.auto_shard_policy
    assert policy is tf.data.experimental.AutoShardPolicy.OFF
    assert "Prefetch" in type(prepared).__name__


# -- the callback ----------------------------------------------------------------------------------------------------


def train_with(config: dict[str, Any]) -> None:
    """Two epochs of two batches and a validation, once for each of the callback's arguments, whose number is reported
    in between."""
    import tensorflow as tf

    from distrain.tensorflow.keras import ReportCheckpointCallback

    class Longer(ReportCheckpointCallback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["mine"] = epoch
            super().on_epoch_end(epoch, logs)

    inputs, targets = tf.ones((4, 3)), tf.zeros((4, 2))
    for number, arguments in enumerate(config["arguments"]):
        model = make_model(config["package"])
        distrain.report({"case": number})
        kind = Longer if arguments.pop("longer", False) else ReportCheckpointCallback
        model.fit(
            *(inputs, targets),
            batch_size=2,
            epochs=2,
            validation_data=(inputs, targets),
            verbose=0,
            callbacks=[kind(**arguments)],
        )


CASES: list[tuple[dict[str, Any], list[tuple[list[str], bool]]]] = [
    ({}, [(["loss", "val_loss"], True)] * 2),
    ({"metrics": ["val_loss"]}, [(["val_loss"], True)] * 2),
    ({"metrics": {"a": "loss", "b": "val_loss"}}, [(["a", "b"], True)] * 2),
    (
        {"checkpoint_on": "train_end", "metrics": "loss"},
        [(["loss"], False), (["loss"], False), (["loss"], True)],
    ),
    (
        {"checkpoint_on": [], "report_metrics_on": ["train_batch_end", "test_end"], "metrics": "loss"},
        [(["loss"], False)] * 6,
    ),
    ({"checkpoint_on": ["train_begin"], "report_metrics_on": []}, [([], True)]),
    ({"longer": True, "metrics": ["mine"]}, [(["mine"], True)] * 2),
]
"""Arguments; and of each report the metrics, and whether it has a checkpoint."""


@pytest.mark.sample(1)
@generations
def test_what_the_callback_reports(storage: Path, package: str) -> None:
    fit = Fit(storage=storage, backend=TensorflowConfig())
    config = {"package": package, "arguments": [dict(arguments) for arguments, _ in CASES]}
    run = fit(train_with, config, workers=1)
    found: list[list[list[str]]] = []
    for metrics in reported(run.path):
        if "case" in metrics:
            found.append([])
        else:
            found[-1].append(sorted(metrics))
    assert found == [[names for names, _ in expected] for _, expected in CASES]
    with_checkpoint = [names for _, expected in CASES for names, checkpoint in expected if checkpoint]
    assert [sorted(metrics) for _, metrics in run.best_checkpoints] == with_checkpoint


def test_unknown_events_are_refused() -> None:
    from distrain.tensorflow.keras import ReportCheckpointCallback

    with pytest.raises(ValueError, match=r"checkpoint_on=...\): there is no \['validation_end'\]"):
        ReportCheckpointCallback(checkpoint_on="validation_end")
    with pytest.raises(ValueError, match=r"report_metrics_on=...\): there is no \['x'\]"):
        ReportCheckpointCallback(report_metrics_on=["epoch_end", "x"])


def test_a_metric_that_is_not_logged_is_named(storage: Path) -> None:
    fit = Fit(storage=storage, backend=TensorflowConfig())
    with pytest.raises(
        distrain.WorkerGroupError, match=r"Keras logs no \['accuracy'\] here, but \['loss', 'val_loss'\]"
    ):
        fit(train_with, {"package": "tf_keras", "arguments": [{"metrics": ["accuracy", "loss"]}]}, workers=1)

"""TensorflowConfig without TensorFlow: TF_CONFIG, whose GPU is whose, and what is said of Keras' two generations."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from distrain.tensorflow import TensorflowConfig, TensorflowTrainer, config


@pytest.mark.parametrize("rank", [0, 2])
def test_every_rank_knows_the_addresses_of_all(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    workers = [f"10.0.0.1:{5000 + number}" for number in range(3)]
    addresses = SimpleNamespace(by_name=lambda *_, on_every_rank, **__: workers if on_every_rank else [])
    monkeypatch.setattr(config, "session_of", lambda _: SimpleNamespace(addresses=addresses))
    for name in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    TensorflowConfig().setup(SimpleNamespace(devices=(), world_rank=rank))  # type: ignore[arg-type]
    task = {"type": "worker", "index": rank}
    assert json.loads(os.environ["TF_CONFIG"]) == {"cluster": {"worker": workers}, "task": task}


@pytest.mark.parametrize(
    ("visible", "devices", "left"),
    [
        (None, (1, 2), "1,2"),
        ("4,5,6", (1, 2), "5,6"),
        ("MIG-1234", (0,), "MIG-1234"),
        ("", (), ""),
    ],
)
def test_a_worker_sees_its_gpus_only(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: tuple[int, ...], left: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    config._hide_other_gpus(devices)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left


def test_the_sigterm_handler_of_python_is_put_back_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[tuple[int, object]] = []
    monkeypatch.setattr("distrain.tensorflow.config.signal.signal", lambda *arguments: put.append(arguments))
    for handler in (print, signal.SIG_DFL, signal.SIG_IGN, None):
        monkeypatch.setattr("distrain.tensorflow.config.signal.getsignal", lambda number, found=handler: found)
        TensorflowConfig().at_report()
    assert put == [(signal.SIGTERM, print)]


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (float("inf"), ValueError), (float("nan"), ValueError), (True, TypeError)]
)
def test_a_timeout_that_is_none_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="start_timeout_s"):
        TensorflowConfig(start_timeout_s=value)


# -- the generations of Keras ----------------------------------------------------------------------------------------

PER_REPLICA = ValueError("Attempt to convert a value (PerReplica:{...}) with an unsupported type to a Tensor.")
FOREIGN_LAYER = TypeError("The added layer must be an instance of class Layer, not <class 'keras.src.layers.Dense'>.")
NO_KERAS = ImportError("Keras cannot be imported. Check that it is installed.")
KERAS_2, KERAS_3 = "/site-packages/tf_keras/src/engine/training.py", "/site-packages/keras/src/trainers/trainer.py"


def raised_in(file: str, error: Exception) -> Exception:
    """Such an error, with a traceback that goes through the file."""
    try:
        exec(compile("raise error", file, "exec"), {"error": type(error)(*error.args)})
    except Exception as caught:
        return caught
    raise AssertionError


@pytest.mark.parametrize(
    ("file", "error", "text"),
    [
        (KERAS_3, PER_REPLICA, "Keras 3's model.fit() does not work"),
        (KERAS_2, PER_REPLICA, None),
        (KERAS_2, FOREIGN_LAYER, "this is a part of Keras 3"),
        (KERAS_3, FOREIGN_LAYER, None),
        ("train.py", NO_KERAS, "pip install 'distrain[tensorflow]'"),
        ("train.py", ImportError("no module named x"), None),
    ],
)
def test_errors_that_mix_up_keras_are_explained(
    monkeypatch: pytest.MonkeyPatch, file: str, error: Exception, text: str | None
) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    said = TensorflowConfig().explain(raised_in(file, error))
    if text is None:
        assert said is None
    else:
        assert said is not None
        assert text in said
        assert "\n" not in said
        assert "TF_USE_LEGACY_KERAS" in said


# -- tensorflow_backend ----------------------------------------------------------------------------------------------


def test_the_old_name_works_and_another_backend_is_refused() -> None:
    backend = TensorflowConfig(start_timeout_s=7)
    with pytest.warns(DeprecationWarning, match="use tensorflow_config"):
        assert TensorflowTrainer(print, tensorflow_backend=backend)._work.backend is backend
    assert TensorflowTrainer(print)._work.backend == TensorflowConfig()
    with pytest.raises(TypeError, match=r"tensorflow_config must be a distrain\.tensorflow\.TensorflowConfig"):
        TensorflowTrainer(print, tensorflow_config="grpc")  # type: ignore[arg-type]

"""The examples with TensorFlow, run as the README says. Needs TensorFlow: scripts/test_tensorflow."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.test_examples import number, output_of

if TYPE_CHECKING:
    from pathlib import Path

if find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; scripts/test_tensorflow", allow_module_level=True)

pytestmark = pytest.mark.timeout(240)


@pytest.mark.sample(1, of="TensorFlow examples")
def test_the_quickstart(tmp_path: Path) -> None:
    output = output_of("tensorflow_quickstart", tmp_path, "--epochs", "3")
    assert number("reported accuracy of the training", output) > 0.85
    assert number("accuracy of the model in the checkpoint on the test images", output) > 0.85


@pytest.mark.sample(1, of="TensorFlow examples")
def test_checkpoints(tmp_path: Path) -> None:
    output = output_of("tensorflow_checkpoints", tmp_path)
    assert "epochs of the first run: [0, 1, 2, 3]\n" in output
    assert "epochs of the second run: [4, 5]\n" in output
    killed = number("killed in epoch 2, and resumed; after epoch 3: loss", output)
    assert killed > number("after epoch 5: loss", output)


@pytest.mark.sample(1, of="TensorFlow examples")
def test_keras_3(tmp_path: Path) -> None:
    output = output_of("keras_3_example", tmp_path)
    assert number("reported loss", output) < 0.6
    assert number("accuracy on the test images", output) > 0.8


@pytest.mark.sample(1, of="TensorFlow examples")
def test_data(tmp_path: Path) -> None:
    output = output_of("tensorflow_data", tmp_path)
    assert number("a worker was killed in epoch 2, and the run went on: loss", output) < 1
    assert output.endswith("each image was used 4 times in 4 epochs\n")


TUTORIAL = """
import json, os
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
x = tf.random.stateless_normal((64, 4), seed=(1, 2))
data = tf.data.Dataset.from_tensor_slices((x, tf.reduce_sum(x, 1, keepdims=True))).batch(8 * num_workers).repeat()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
    model.compile(loss="mse", optimizer=tf.keras.optimizers.SGD(0.1))
history = model.fit(data, epochs=2, steps_per_epoch=4, verbose=0).history["loss"]
print(tf_config["task"]["index"], strategy.num_replicas_in_sync, history[1] < history[0])
"""
"""In the manner of main.py of TensorFlow's guide to multi-worker training with Keras."""


def test_a_script_that_reads_tf_config(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(TUTORIAL)
    command = [sys.executable, "-m", "distrain.launch", "--num-workers", "2", "--storage-path", "runs", "main.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert {"[rank 0] 0 2 True", "[rank 1] 1 2 True"} <= {*done.stdout.splitlines()}

"""The TensorFlow code of the documents that the project was made from (S3), run as a user runs it.

See test_seeds.py, whose rules apply here. Needs TensorFlow: scripts/test_tensorflow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.test_seeds import SEEDS, Ran, block, checkpoint_files, edit, fill, migrated, new_side, reports

if TYPE_CHECKING:
    from collections.abc import Callable

if find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; scripts/test_tensorflow", allow_module_level=True)

pytestmark = [
    pytest.mark.skipif(
        not SEEDS.is_dir(), reason=f"the seed documents are not at {SEEDS}; name their directory in DISTRAIN_SEEDS"
    ),
    pytest.mark.timeout(300),
]


@pytest.fixture
def finish(tmp_path: Path) -> Callable[[str], Ran]:
    """Run a source text as a script, in a directory and a home of its own; it must run to its end."""

    def run_to_the_end(source: str) -> Ran:
        (tmp_path / "script.py").write_text(source)
        environment = {**os.environ, "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{done.stderr}\n{done.stdout}\n--- of:\n{source}"
        return Ran(done.returncode, done.stdout, done.stderr, tmp_path)

    return run_to_the_end


IMPORT_JSON = "import json\n"
"""Which the document uses, and does not import."""


def test_s3_saves_checkpoints(finish: Callable[[str], Ran]) -> None:
    ran = finish(migrated(IMPORT_JSON + block("S3 save")))
    first, second = (reports(ran.result)[rank] for rank in (0, 1))
    assert first == second
    assert len(first) == 5
    assert checkpoint_files(ran.result) == ["checkpoint.json", "model.keras"]
    assert ran.result.checkpoint is not None
    assert json.loads(Path(ran.result.checkpoint.path, "checkpoint.json").read_text()) == {"epoch": 4}
    assert f"{ran.result.checkpoint}\n" in ran.output
    assert "different contents" not in ran.errors, "every rank saves the same model"


def test_s3_loads_a_checkpoint(finish: Callable[[str], Ran]) -> None:
    told = ("        if checkpoint:\n", '        if checkpoint:\n            print("goes on from", checkpoint.path)\n')
    ran = finish(migrated(IMPORT_JSON + edit(block("S3 load"), told)))
    assert [len(result.best_checkpoints) for result in ran.results] == [5, 5]
    first = ran.results[0].checkpoint
    assert first is not None
    assert (ran.output + ran.errors).count(f"goes on from {first.path}\n") == 2
    assert [checkpoint_files(result) for result in ran.results] == [["checkpoint.json", "model.keras"]] * 2


TOYS = """\
import numpy
import tensorflow as tf
from ray import train

worker_batch_size = 10
X = numpy.ones((40, 4), "float32")
Y = numpy.zeros((40, 1), "float32")

def make_layers():
    return tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
"""
"""What the document's names stand for."""


def test_s3s_strategy_batch_size_backend_and_callback(finish: Callable[[str], Ran]) -> None:
    """The pieces of the guide, put together in its order."""
    model = edit(
        block("S3 strategy"),
        ("model = ... # build model", "model = make_layers()"),
        ("model.compile()", 'model.compile("sgd", "mse")'),
    )
    in_function = model + new_side(block("S3 batch size diff")) + "dataset = X, Y\nepochs = 2\n"
    function = fill(
        edit(
            block("S3 callback"),
            ("# ...\n", "...\n"),
            ("model.fit(dataset, callbacks", "model.fit(*dataset, batch_size=batch_size, callbacks"),
        ),
        in_function,
    )
    backend = edit(block("S3 tensorflow backend"), ("TensorflowConfig(...)", "TensorflowConfig()"))
    ran = finish(
        migrated(TOYS + function + block("S3 trainer") + block("S3 fit") + backend + block("S3 fit")),
    )
    for result in ran.results:
        first, second = (reports(result)[rank] for rank in (0, 1))
        assert first == second
        assert [list(metrics) for metrics in first] == [["loss"], ["loss"]]
        assert checkpoint_files(result) == ["model.keras"]
        assert len(result.best_checkpoints) == 2
    assert len(ran.results) == 2
    assert "2/2 [==============================]" in ran.output + ran.errors, "batches of 20 of 40 rows"
    assert "tensorflow_backend is an old name" in ran.errors


def test_s3s_data_shard(finish: Callable[[str], Ran]) -> None:
    """With a stand-in for Ray Data's shard, which is all that distrain does not have."""
    stand_in = """\
class Shard:
    def iter_tf_batches(self, batch_size, dtypes):
        rank = train.get_context().get_world_rank()
        for _ in range(2):
            ones = tf.ones((batch_size, 784), dtypes)
            yield {"image": ones * rank, "label": ones}

def make_model():
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(784, input_shape=(784,))])
        model.compile("sgd", "mse")
    return model
"""
    function = edit(
        block("S3 data shard"),
        ("    # ...\n", "    epochs, multi_worker_model = 2, make_model()\n"),
        ('train.get_context().get_dataset_shard("train")', "Shard()"),
    )
    told = '        train.report({"loss": history.history["loss"]})\n'
    ran = finish(migrated(stand_in + function + told + block("S3 trainer") + block("S3 fit")))
    first, second = (reports(ran.result)[rank] for rank in (0, 1))
    assert first == second
    assert [len(metrics["loss"]) for metrics in first] == [1, 1]
